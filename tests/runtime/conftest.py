"""Topics and sources on the in-memory broker for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from keyshard.core import range_watchdog
from keyshard.core.releases import DEFAULT_VERSION
from keyshard.observe import broker_poll, monitor
from keyshard.reading import scan
from tests.support.changing_topics import ChangingTopics
from tests.support.control_folder import own_control_folder
from tests.support.coordinated_topic import CoordinatedTopic
from tests.support.copied_topic import Copied, SinkTopic
from tests.support.dead_letter_topic import DeadLetterTopic
from tests.support.gap_topic import GapTopic
from tests.support.handled_topic import HandledTopic
from tests.support.parking_topic import ParkingTopic
from tests.support.recorded_handler import RecordedHandler
from tests.support.rescaled_source import RescaledSource
from tests.support.schema_shop import Shop
from tests.support.simulated import LaterFixture, run_simulated
from tests.support.split_topic import SplitTopic
from tests.support.watched_job import Job

SEEDS = 3
"""Simulated courses of a test that has the marker ``simulated`` without a number of seeds."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that has the marker ``simulated`` once for each seed."""
    mark = metafunc.definition.get_closest_marker("simulated")
    if mark is not None:
        seeds = range(mark.kwargs.get("seeds", SEEDS))
        metafunc.fixturenames.append("simulated")
        metafunc.parametrize("simulated", seeds, ids="seed-{}".format)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> LaterFixture | None:
    """Let the simulation make the fixtures of the runtime tests, if it runs the test."""
    of_folder = fixturedef.func.__module__.startswith("tests.runtime.")
    ours = of_folder and fixturedef.scope == "function"
    if not ours or _seed(request.node) is None:
        return None
    arguments = {name: request.getfixturevalue(name) for name in fixturedef.argnames}
    later = LaterFixture(fixturedef.func, arguments)
    key = getattr(request, "param", None)
    fixturedef.cached_result = (later, key, None)
    return later


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test in the simulation if it has a seed: see ``run_simulated``."""
    seed = _seed(pyfuncitem)
    if seed is None:
        return None
    fixtures = pyfuncitem.funcargs
    arguments = {name: fixtures[name] for name in pyfuncitem._fixtureinfo.argnames}
    run_simulated(pyfuncitem.obj, arguments, seed, fixtures)
    return True


def _seed(test: Any) -> int | None:
    """Return the seed of a simulated test; ``None`` for others."""
    marked = test.get_closest_marker("simulated") is not None
    return test.callspec.params["simulated"] if marked else None


@pytest.fixture
def orders() -> Iterator[HandledTopic]:
    topic = HandledTopic()
    yield topic
    topic.cluster.validate()


@pytest.fixture
def coordinated() -> Iterator[CoordinatedTopic]:
    topic = CoordinatedTopic()
    yield topic
    topic.cluster.validate()


@pytest.fixture
def split_topic() -> Iterator[SplitTopic]:
    topic = SplitTopic()
    yield topic
    topic.cluster.validate()


@pytest.fixture
def copied() -> Iterator[Copied]:
    made = Copied()
    yield made
    made.cluster.validate()


@pytest.fixture
def gap_topic() -> Iterator[GapTopic]:
    topic = GapTopic()
    yield topic
    topic.cluster.validate()


@pytest.fixture
def parking() -> Iterator[ParkingTopic]:
    topic = ParkingTopic()
    yield topic
    topic.cluster.validate()


@pytest.fixture
def dlq() -> Iterator[DeadLetterTopic]:
    topic = DeadLetterTopic()
    yield topic
    topic.close()


@pytest.fixture
def changing(request: pytest.FixtureRequest) -> Iterator[ChangingTopics]:
    """A cluster whose topics a test creates and deletes; a parameter sets its release of Pulsar."""
    topics = ChangingTopics(getattr(request, "param", DEFAULT_VERSION))
    yield topics
    topics.cluster.validate()


@pytest.fixture
def control_folder() -> Iterator[None]:
    """No control socket of another test is in the folder."""
    with own_control_folder():
        yield


@pytest.fixture
def reads_in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers wait a millisecond for more, and retries not at all."""
    monkeypatch.setattr(scan, "READ_WAIT_MS", 1)
    monkeypatch.setattr("tenacity.nap.sleep", lambda _s: None)


@pytest.fixture
def make_recorded() -> Iterator[Callable[..., RecordedHandler]]:
    made: list[RecordedHandler] = []

    def make(handle: Any, **settings: Any) -> RecordedHandler:
        made.append(RecordedHandler(handle, **settings))
        return made[-1]

    yield make
    for recorded in made:
        recorded.end()
        recorded.cluster.validate()


@pytest.fixture
def make_rescaled() -> Iterator[Callable[..., RescaledSource]]:
    made: list[RescaledSource] = []

    def make(*args: Any, **settings: Any) -> RescaledSource:
        made.append(RescaledSource(*args, **settings))
        return made[-1]

    yield make
    for rescaled in made:
        rescaled.end()


@pytest.fixture
def world() -> Iterator[SinkTopic]:
    """A deduplicated topic with sinks, which end after the test."""
    made = SinkTopic(send_timeout_ms=2_000)
    yield made
    made.close()


@pytest.fixture
def job() -> Iterator[Job]:
    """A source of four ranges, which ends after the test."""
    made = Job()
    yield made
    made.stop()


@pytest.fixture
def quick_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog looks often and waits for less."""
    monkeypatch.setattr(monitor, "LOOK_S", 0.02)
    monkeypatch.setattr(range_watchdog, "STALL_S", 0.3)
    monkeypatch.setattr(broker_poll, "FACTS_ROUND_S", 0.05)


@pytest.fixture
def shop() -> Shop:
    return Shop()
