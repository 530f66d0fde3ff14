"""Fixtures for all tests, and the order in which several processes run them.

The real broker is started once per process, when a test needs it. One test of the gate
(``make test``) kills and restarts it.
"""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from keyshard.testing.devbroker import DevBroker, DevCluster
from tests.spark_classes import QUICK, java_options, submit_arguments
from tests.support import one_line_logs
from tests.support.control_folder import own_control_folder
from tests.support.deadlines import FACTOR, deadline
from tests.support.kinds import KINDS, kind_of_item, real
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
LONG = frozenset({"spark", "ray", "mutants", "simulation", "chaos", "ways"})
"""Folders whose tests last longest."""
PROCESSES_MAX = 8
"""Most processes that ``-n auto`` starts."""
MEMORY_PER_PROCESS = 2_500_000_000
"""A broker, and a Spark session or a Ray, bytes."""
TOGETHER = {
    "tests/ray": "one Ray",
    "tests/spark/test_bad_input.py": "one Spark session",
    "tests/spark/test_connect.py": "the port of Spark Connect",
    "tests/spark/test_declarative_pipeline.py": "the port of Spark Connect",
    "tests/spark/test_exactly_once.py": "one Spark cluster",
    "tests/spark/test_executors.py": "one Spark cluster",
    "tests/spark/test_secure.py": "one Spark session",
    "tests/spark/test_triggers.py": "one Spark session",
    "tests/contract/test_crash.py": "one broker that breaks",
    "tests/contract/test_undelivered.py": "one broker that breaks",
    "tests/contract/test_producer.py": "one broker that breaks",
    "tests/contract/test_lost_connection.py": "one cut broker",
    "tests/integration/test_reader_disconnects.py": "one cut broker of readers",
    "tests/integration/test_data_loss.py": "one broker that loses data",
    "tests/integration/test_cluster.py": "one cluster",
    "tests/integration/test_failing_bookie.py": "one cluster whose bookie fails",
    "tests/integration/test_stopped_writers.py": "one broker of stopped writers",
    "tests/integration/test_readme.py": "one page",
    "tests/integration/test_status.py": "one source",
    "tests/mutants/test_mutants.py": "one copy of the code",
}
"""Files and folders whose tests share something expensive, or an order: one process runs them."""


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
    if kinds := config.getoption("kind"):
        _select(config, items, kinds)
    _scale_limits(config, items)

    def rank(item: pytest.Item) -> int:
        found = (place for place, part in enumerate(ORDER) if item.nodeid.startswith(part))
        return next(found, len(ORDER))

    items.sort(key=rank)


def _select(config: pytest.Config, items: list[pytest.Item], kinds: list[str]) -> None:
    """Keep the tests of these kinds."""
    others: list[pytest.Item] = []
    selected: list[pytest.Item] = []
    for item in items:
        (selected if kind_of_item(item) in kinds else others).append(item)
    if "real" in kinds and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        missing = real() - {item.nodeid for item in selected}
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


class Together(LoadScopeScheduling):  # type: ignore[misc]
    """Gives a process the next test, or all tests of one group.

    A process always has a test that waits behind the running one. A long test never waits behind
    another long one, because another process may be idle meanwhile. Half of the processes begin
    with long tests, and so have a Spark session; the others run the rest as long as there is any.
    """

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        self._at_length: set[Any] = set()
        """Processes that run, or have run, long tests."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return TOGETHER.get(file) or TOGETHER.get(file.rpartition("/")[0], nodeid)

    def _assign_work_unit(self, node: Any) -> None:
        busy = any(map(goes_on, self.assigned_work[node].values()))
        has_room = node in self._at_length or 2 * len(self._at_length) < len(self.assigned_work)
        long = has_room and not busy
        fitting = (scope for scope, unit in self.workqueue.items() if lasts(unit) == long)
        scope = next(fitting, next(iter(self.workqueue)))
        if lasts(self.workqueue[scope]):
            self._at_length.add(node)
        self.workqueue.move_to_end(scope, last=False)
        super()._assign_work_unit(node)


def goes_on(unit: Mapping[str, bool]) -> bool:
    """Whether these tests last long, and not all of them have run."""
    return lasts(unit) and not all(unit.values())


def lasts(unit: Iterable[str]) -> bool:
    """Whether these tests last long: those of some folders, or many that go together."""
    file = next(iter(unit)).partition("::")[0]
    return file.split("/")[1] in LONG or file in TOGETHER


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
