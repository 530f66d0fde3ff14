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
from tests.support.simulated import run_simulated
from tests.support.split_topic import SplitTopic
from tests.support.watched_job import Job

SEEDS = 3
"""Simulated courses of each test that uses :func:`simulated`."""


@pytest.fixture(params=range(SEEDS), ids="seed-{}".format)
def simulated(request: pytest.FixtureRequest) -> int:
    """Run the body of the test in the simulation, with this seed: see ``run_simulated``."""
    seed: int = request.param
    return seed


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the body of a test in the simulation if it uses :func:`simulated`."""
    seed = pyfuncitem.funcargs.get("simulated")
    if not isinstance(seed, int):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    run_simulated(pyfuncitem.obj, arguments, seed)
    return True


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
def make_rescaled(request: pytest.FixtureRequest) -> Iterator[Callable[..., RescaledSource]]:
    made: list[RescaledSource] = []

    def make(*args: Any, **settings: Any) -> RescaledSource:
        made.append(RescaledSource(*args, **settings))
        return made[-1]

    yield make
    if "simulated" not in request.fixturenames:  # the scheduler has ended the threads
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
