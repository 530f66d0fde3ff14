"""Fixtures for all tests, and the order in which several processes run them.

The real broker is started once per process, when a test needs it. One test of the gate
(``make test``) kills and restarts it.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from keyshard.testing.devbroker import DevBroker, DevCluster
from tests.spark_classes import QUICK, java_options, submit_arguments
from tests.support import one_line_logs
from tests.support.control_folder import own_control_folder
from tests.support.deadlines import FACTOR, deadline
from tests.support.groups import Together
from tests.support.kinds import ALL_TESTS, KINDS, kind_of_item, real
from tests.support.preemption import preempted
from tests.support.tested_pulsar import BROKERS, PULSAR

if TYPE_CHECKING:
    from tests.contract.pulsar_harness import PulsarHarness

pytest_plugins = ["tests.support.second_runs"]

# A shell that starts "make test &" has it ignore these signals, and every process that a test
# starts inherits that: Ctrl-C would end none of them. A handler of this process is not inherited.
for number in (signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(number) is signal.SIG_IGN:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, default)

# The time of an example depends on the load of the machine. The examples are the same in each run;
# "--hypothesis-profile fresh" draws others.
settings.register_profile("keyshard", deadline=None, derandomize=True)
settings.register_profile("fresh", deadline=None, derandomize=False)
settings.load_profile("keyshard")

one_line_logs.install()

ORDER = (
    *("tests/unit", "tests/property"),
    *("tests/ray", "tests/integration/test_readme.py", "tests/spark/test_exactly_once.py"),
    *("tests/chaos", "tests/spark", "tests/mutants", "tests/simulation", "tests/ways"),
)
"""The fastest tests come first, then those that last longest in one process. The rest fills the
processes up to the end."""
PROCESSES_MAX = 8
"""Most processes that ``-n auto`` starts."""
MEMORY_PER_PROCESS = 2_500_000_000
"""A broker, and a Spark session or a Ray, bytes."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Tests are selected by their kind."""
    parser.addoption(
        "--kind", action="append", choices=KINDS, default=[],
        help="; ".join(f"{kind}: {what}" for kind, what in KINDS.items()),
    )  # fmt: skip
    parser.addoption("--preempt", metavar="SEED", help="threads stop for a while at random calls")


def pytest_report_header() -> str:
    """Say how slow the machine is."""
    return f"machine factor {FACTOR:.1f}: deadlines of tests are {FACTOR:.1f} times as long"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select tests by kind, scale their time limits, and order them by folder or file."""
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        config.stash[ALL_TESTS] = frozenset(item.nodeid for item in items)
    if kinds := config.getoption("kind"):
        _select(config, items, kinds)
    _scale_limits(config, items)

    def rank(item: pytest.Item) -> int:
        found = (place for place, part in enumerate(ORDER) if item.nodeid.startswith(part))
        return next(found, len(ORDER))

    items.sort(key=rank)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave modules and tests out of the collection of garbage: they stay until the end.

    They are so many that each full collection takes a third of a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def _select(config: pytest.Config, items: list[pytest.Item], kinds: list[str]) -> None:
    """Keep the tests of these kinds."""
    others: list[pytest.Item] = []
    selected: list[pytest.Item] = []
    for item in items:
        (selected if kind_of_item(item) in kinds else others).append(item)
    if "real" in kinds and ALL_TESTS in config.stash:
        all_tests = config.stash[ALL_TESTS]
        missing = real() - all_tests
        if missing:
            raise pytest.UsageError(f"tests/gate.toml names tests that do not exist: {missing}")
    items[:] = selected
    config.hook.pytest_deselected(items=others)


def _scale_limits(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Multiply each test's limit by the factor of the machine; ``--timeout`` is taken as it is."""
    asked_s = config.getoption("timeout")
    for item in items:
        limit = item.get_closest_marker("timeout")
        if limit is not None:
            item.add_marker(pytest.mark.timeout(deadline(limit.args[0])), append=False)
        elif asked_s is None:
            quiet_s = float(config.getini("timeout"))
            item.add_marker(pytest.mark.timeout(deadline(quiet_s)))


def pytest_xdist_auto_num_workers() -> int:
    """Return the number of processes for ``-n auto``: as many as cores and memory allow."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, memory // MEMORY_PER_PROCESS, PROCESSES_MAX))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Together:
    """Return the scheduler for ``-n``, whatever ``--dist`` is."""
    config.option.loadscopereorder = False  # the order is that of the collection
    return Together(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape lone surrogates in log texts: no process can send them to another."""
    report = yield
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections
    ]
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Let the threads of a test stop at random calls, if that is asked for."""
    seed = item.config.getoption("preempt")
    if seed is None:
        return (yield)
    with preempted(f"{seed} {item.nodeid}"):
        return (yield)


@pytest.fixture(scope="session")
def dev_broker() -> Iterator[DevBroker | DevCluster]:
    """A real Pulsar broker of this session; most tests that kill brokers start their own."""
    if BROKERS > 1:
        with DevCluster(BROKERS, version=PULSAR) as cluster:
            yield cluster
    else:
        with DevBroker(PULSAR) as broker:
            yield broker


@pytest.fixture
def harness(dev_broker: DevBroker) -> Iterator[PulsarHarness]:
    """The session's broker, for reads without a subscription.

    Every two minutes a broker deletes ledgers that no subscription needs, unless it keeps all.
    """
    from tests.contract.pulsar_harness import PulsarHarness  # noqa: PLC0415 - only who needs it

    made = PulsarHarness(dev_broker.service_url, dev_broker.admin_url)
    made.keep_all()
    yield made
    made.close()


@pytest.fixture
def topic_name() -> str:
    """A short topic name that no other test uses."""
    return f"t-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The development broker keeps what it installs in a folder of this test."""
    monkeypatch.setenv("KEYSHARD_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session", autouse=True)
def _control_folder() -> Iterator[None]:
    """Give the sources of tests their own control folder, apart from others on this machine."""
    with own_control_folder():
        yield


@pytest.fixture(scope="session", autouse=True)
def _ray_environment() -> None:
    """Ray's workers get their turn beside other tests: by default they run at niceness 15."""
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - this is its name


@pytest.fixture(scope="session", autouse=True)
def _spark_environment() -> None:
    """Spark's Python workers run in this interpreter."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let the JVM of a Spark test map its classes.

    If they are not recorded yet, the first Spark test waits for that. Other tests never wait.
    """
    if item.get_closest_marker("spark"):
        # For the launcher JVM, which prints the command of the driver.
        os.environ["SPARK_LAUNCHER_OPTS"] = QUICK
        os.environ["PYSPARK_SUBMIT_ARGS"] = submit_arguments(java_options())
