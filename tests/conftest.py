"""Fixtures for all tests, and the order in which several processes run them.

The real broker is started once per process, when a test needs it.
"""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from control_folder import own_control_folder
from keyshard.testing.devbroker import DevBroker, DevCluster
from tests.tested_pulsar import BROKERS, PULSAR

# A shell that starts "make test &" has it ignore these signals, and every process that a test
# starts inherits that: Ctrl-C would end none of them. A handler of this process is not inherited.
for number in (signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(number) is signal.SIG_IGN:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, default)

# How long an example takes depends on what else the machine does.
settings.register_profile("keyshard", deadline=None)
settings.load_profile("keyshard")

FOLDERS = (
    *("unit", "property", "spark", "ray", "mutants", "simulation", "chaos", "ways"),
    "integration",
)
"""What tells most in the least time comes first, then what lasts or waits longest; the rest fills
the processes up to the end."""
LONG = frozenset({"spark", "ray", "mutants", "simulation", "chaos", "ways"})
"""Folders whose tests last longest."""
PROCESSES_MAX = 8
"""Most processes that ``-n auto`` starts: each may have a broker and a Spark session."""
TOGETHER = {
    "tests/ray": "one Ray",
    "tests/spark/test_bad_input.py": "one Spark session",
    "tests/spark/test_exactly_once.py": "one Spark cluster",
    "tests/spark/test_executors.py": "one Spark cluster",
    "tests/spark/test_secure.py": "one Spark session",
    "tests/spark/test_triggers.py": "one Spark session",
    "tests/contract/test_crash.py": "one broker that breaks",
    "tests/contract/test_hidden.py": "one broker that breaks",
    "tests/contract/test_producer.py": "one broker that breaks",
    "tests/contract/test_cut_reader.py": "one cut broker",
    "tests/integration/test_cut_readers.py": "one cut broker of readers",
    "tests/integration/test_data_loss.py": "one broker that loses data",
    "tests/integration/test_cluster.py": "one cluster",
    "tests/integration/test_readme.py": "one page",
    "tests/integration/test_status.py": "one source",
    "tests/mutants/test_mutants.py": "one copy of the code",
}
"""Files and folders whose tests share something expensive, or an order: one process runs them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests by their folders."""

    def rank(item: pytest.Item) -> int:
        folder = item.path.relative_to(item.config.rootpath).parts[1]
        return FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS)

    items.sort(key=rank)


def pytest_xdist_auto_num_workers() -> int:
    """What ``-n auto`` means: one for each core, and two for what waits.

    Each has brokers, a Spark or a Ray beside it: more keep each other waiting until deadlines pass.
    """
    return min(len(os.sched_getaffinity(0)) + 2, PROCESSES_MAX)


class Together(LoadScopeScheduling):  # type: ignore[misc]
    """Gives a process the next test, or all of those that go together.

    A process always has a test that waits behind the one that runs. What lasts long never waits
    behind something else that lasts long, as another process may have nothing to do meanwhile. And
    half the processes are for the rest while there is any: that mostly waits, the other computes.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return TOGETHER.get(file) or TOGETHER.get(file.rpartition("/")[0], nodeid)

    def _assign_work_unit(self, node: Any) -> None:
        at_it = [
            each for each, work in self.assigned_work.items() if any(map(goes_on, work.values()))
        ]
        if node in at_it or 2 * len(at_it) >= len(self.assigned_work):
            short = (scope for scope, unit in self.workqueue.items() if not lasts(unit))
            self.workqueue.move_to_end(next(short, next(iter(self.workqueue))), last=False)
        super()._assign_work_unit(node)


def goes_on(unit: Mapping[str, bool]) -> bool:
    """Whether these tests last long, and not all of them have run."""
    return lasts(unit) and not all(unit.values())


def lasts(unit: Iterable[str]) -> bool:
    """Whether these tests last long: those of some folders, or many that go together."""
    file = next(iter(unit)).partition("::")[0]
    return file.split("/")[1] in LONG or file in TOGETHER


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Together:
    """What ``-n`` goes by, whatever ``--dist`` says."""
    config.option.loadscopereorder = False  # the order is that of the folders
    return Together(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test logs may hold lone surrogates, which no process can send to another."""
    report = yield
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections
    ]
    return report


@pytest.fixture(scope="session")
def dev_broker() -> Iterator[DevBroker | DevCluster]:
    """A real Pulsar broker of this session; tests that kill brokers start their own."""
    if BROKERS > 1:
        with DevCluster(BROKERS, version=PULSAR) as cluster:
            yield cluster
    else:
        with DevBroker(PULSAR) as broker:
            yield broker


@pytest.fixture
def topic_name() -> str:
    """A short topic name that no other test uses."""
    return f"t-{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="session", autouse=True)
def _control_folder() -> Iterator[None]:
    """Sources of tests are not found among those that somebody runs here."""
    with own_control_folder():
        yield


@pytest.fixture(scope="session", autouse=True)
def _spark_environment() -> None:
    """Spark's Python workers run in this interpreter, and its JVM does not optimise what ends soon.

    A session and a few batches then take two thirds of the processor time (16 s against 24 s).
    """
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["PYSPARK_SUBMIT_ARGS"] = (
        "--conf 'spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC' "
        "--conf spark.python.authenticate.socketTimeout=60s pyspark-shell"
    )
