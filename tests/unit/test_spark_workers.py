"""Workers on Spark's executors, without Spark: slots, spread, registry, launchers, refusals."""

from __future__ import annotations

import os
import stat
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyshard.config.connection import Connection
from keyshard.config.workers import WorkersOption
from keyshard.errors import ConfigError, WorkerEnvironmentError, WorkerUnreachableError
from keyshard.version import VERSION
from keyshard.workers.worker import AuthenticatedClient, Worker, setup_of
from spark_adapter.workers import launcher as launching
from spark_adapter.workers import registry
from spark_adapter.workers.executors import Slots, choose_tasks, start_workers, why
from spark_adapter.workers.launcher import WorkerLauncher, backend

TOKEN = "s3cret"
NOWHERE = Connection("pulsar://127.0.0.1:1")


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the registries of this test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def launcher() -> Iterator[WorkerLauncher]:
    made = WorkerLauncher(TOKEN, "127.0.0.1")
    yield made
    made.close()


@pytest.mark.parametrize(
    ("executors", "tasks", "most"), [(2, 4, 2), (2, 3, 1), (3, 3, 0), (1, 8, 7), (5, 40, 35)]
)
def test_every_executor_keeps_a_slot(executors: int, tasks: int, most: int) -> None:
    slots = Slots(executors, tasks)
    for count in range(1, most + 1):
        slots.check(count)
    with pytest.raises(
        ConfigError, match=f"start_workers\\({most + 1}\\) leaves an executor"
    ) as caught:
        slots.check(most + 1)
    assert (f"at most {most}" if most else "Start none") in caught.value.message


@given(st.integers(1, 20), st.integers(1, 8), st.integers(1, 30), st.randoms())
def test_workers_lie_on_as_many_executors_as_there_can_be(
    executors: int, cores: int, count: int, chance: Any
) -> None:
    slots = Slots(executors, executors * cores)
    if count > slots.tasks - executors:
        return
    tasks = slots.tasks_for(count)
    assert count < tasks <= slots.tasks
    # Each task has one of the slots.
    placed = [str(i % executors) for i in chance.sample(range(slots.tasks), tasks)]
    staying = Counter(placed[task] for task in choose_tasks(placed, count))
    assert sum(staying.values()) == count
    assert len(staying) >= min(count, executors)


def test_the_registry_is_for_its_owner_alone(directory: Path) -> None:
    jvm = os.getpid()
    assert registry.read(jvm) is None
    registry.write(jvm, registry.RegisteredLaunchers(TOKEN, ["grpc://h:1"]))
    assert registry.read(jvm) == registry.RegisteredLaunchers(TOKEN, ["grpc://h:1"])
    path = registry.path_of(jvm)
    assert [stat.S_IMODE(one.stat().st_mode) for one in (path.parent, path)] == [0o700, 0o600]
    assert TOKEN not in repr(registry.read(jvm))
    registry.forget(jvm)
    registry.forget(jvm)
    assert registry.read(jvm) is None
    path.parent.chmod(0o755)
    with pytest.raises(ConfigError, match="not a private directory"):
        registry.read(jvm)
    path.parent.rmdir()
    path.parent.symlink_to(directory)
    with pytest.raises(ConfigError, match="not a private directory"):
        registry.write(jvm, registry.RegisteredLaunchers(TOKEN, []))


@pytest.mark.parametrize("found", ["/proc", "ps"])
def test_the_registry_of_a_killed_application_is_not_that_of_the_next(
    found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next JVM with the process id sent its secrets to a foreign listener."""
    if found == "ps":
        monkeypatch.setattr(registry, "Path", lambda _: Path("/nowhere"))
    here = registry._started(os.getpid())
    assert here
    assert here == registry._started(os.getpid())
    with subprocess.Popen(["sleep", "60"]) as other:
        assert registry._started(other.pid) != here or found == "ps"  # ps counts whole seconds
        registry_of = Path(tempfile.gettempdir()) / f"keyshard-spark-{os.getuid()}"
        monkeypatch.setattr(registry, "path_of", lambda jvm: registry_of / f"{jvm}.json")
        registry_of.mkdir(0o700, exist_ok=True)
        registry.write(other.pid, registry.RegisteredLaunchers(TOKEN, ["grpc://h:1"]))
        assert registry.read(other.pid) == registry.RegisteredLaunchers(TOKEN, ["grpc://h:1"])
        other.kill()
    left = registry.path_of(other.pid)
    left.rename(registry.path_of(os.getpid()))
    if found == "/proc":
        assert registry.read(os.getpid()) is None
        assert not registry.path_of(os.getpid()).exists()


@pytest.mark.parametrize(
    "text", [b"", b"{}", b"[]", b'{"token": "t"}', b"[" * 10**5, b"\0", b"\xff"]
)
def test_an_unreadable_registry_counts_as_missing(text: bytes) -> None:
    path = registry.path_of(os.getpid())
    path.write_bytes(text)
    assert registry.read(os.getpid()) is None
    assert not path.exists()


def test_a_query_without_workers_names_a_remedy() -> None:
    two, four = WorkersOption.parse("spark:2"), WorkersOption.parse("spark:4")
    odd = WorkersOption.parse("spark:2?x=1")
    assert two
    assert four
    assert odd
    with pytest.raises(
        ConfigError, match=r"has no workers.\nRemedy: Call spark_adapter.start_workers\(spark, 2"
    ):
        backend(NOWHERE, two)
    with pytest.raises(ConfigError, match="takes no options"):
        backend(NOWHERE, odd)
    registry.write(os.getppid(), registry.RegisteredLaunchers(TOKEN, ["grpc://127.0.0.1:1"] * 2))
    with pytest.raises(ConfigError, match=r"has 2 workers\.\nRemedy: Lower the number"):
        backend(NOWHERE, four)
    start, stop = backend(NOWHERE, two), threading.Event()
    stop.set()
    with pytest.raises(WorkerUnreachableError, match="task of Spark workers did not answer"):
        start(stop)


@pytest.mark.parametrize(
    ("session", "why_not"),
    [
        (SimpleNamespace(), "Spark Connect"),
        (
            SimpleNamespace(
                _sc=SimpleNamespace(
                    master="local[2]",
                    _jsc=SimpleNamespace(sc=lambda: SimpleNamespace(isLocal=lambda: True)),
                )
            ),
            r"Spark is 'local\[2\]'.*'processes:2'",
        ),
    ],
)
def test_a_session_without_executors_is_refused(session: Any, why_not: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){why_not}"):
        start_workers(session, 2)
    with pytest.raises(ConfigError, match="count is 0"):
        start_workers(session, 0)


@pytest.mark.parametrize("fetch", [True, False])
def test_a_worker_keeps_content_if_tasks_fetch_it(
    launcher: WorkerLauncher, monkeypatch: pytest.MonkeyPatch, *, fetch: bool
) -> None:
    """Its status then shows hot keys as unknown from the start."""
    monkeypatch.setattr(launching, "_tasks_fetch", threading.Event())
    monkeypatch.setattr(launching, "Worker", lambda *_: SimpleNamespace())
    if fetch:
        launching.keep_content_in_workers()
    monkeypatch.setattr(AuthenticatedClient, "request", lambda *_, **__: "hello")
    registry.write(os.getppid(), registry.RegisteredLaunchers(TOKEN, [launcher.endpoint]))
    one = WorkersOption.parse("spark:1")
    assert one
    assert backend(NOWHERE, one)(threading.Event()).keeps_content is fetch


def test_a_worker_of_another_version_is_refused_by_name(launcher: WorkerLauncher) -> None:
    setup = setup_of(NOWHERE, keeps=True)
    _, packed = setup.packed()
    with closing(AuthenticatedClient(launcher.endpoint, TOKEN, "launcher")) as client:
        hello = client.request("start", 60.0, version="0.0.7", packed=packed)
    with pytest.raises(WorkerEnvironmentError, match=rf"keyshard is 0\.0\.7 .* but {VERSION}"):
        Worker(hello, setup.token, "worker")


def test_a_request_without_the_token_gets_no_worker(launcher: WorkerLauncher) -> None:
    with (
        closing(AuthenticatedClient(launcher.endpoint, "guess", "launcher")) as client,
        pytest.raises(WorkerUnreachableError, match="does not know the token of the launcher"),
    ):
        client.request("start", 10.0, version=VERSION, packed="")
    assert launcher._children == []


def test_a_server_that_ends_stops_no_other_server_of_its_process() -> None:
    """Issue: when ``serve()`` of one server returned, Arrow stopped another one in 6 of 1,000."""
    for _ in range(500):
        launcher = WorkerLauncher(TOKEN, "127.0.0.1")
        with (
            closing(launcher),
            closing(AuthenticatedClient(launcher.endpoint, "guess", "launcher")) as client,
            pytest.raises(WorkerUnreachableError, match="does not know the token"),
        ):
            client.request("start", 10.0, version=VERSION, packed="")


def test_the_error_that_ended_a_job_is_one_line() -> None:
    head = (
        "An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe."
    )
    lost = "ExecutorLostFailure (executor 1 exited caused by one of the running tasks) Reason: x"
    for lines, said in (
        (["Traceback", "  File x", "ModuleNotFoundError: No module named 'keyshard'", "\tat a.B"],
         "ModuleNotFoundError: No module named 'keyshard'"),
        ([": org.apache.spark.SparkException: Job aborted due to stage failure: y", lost], lost),
        ([": org.apache.spark.SparkException: Job 3 cancelled", "\tat z.Y"],
         "org.apache.spark.SparkException: Job 3 cancelled"),
        ([], head),
    ):  # fmt: skip
        assert why(ValueError("\n".join([head, *lines]))) == said
