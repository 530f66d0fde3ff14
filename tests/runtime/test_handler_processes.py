"""Handlers in processes: their errors, failed imports, and signals to the whole group."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import types
from multiprocessing import popen_spawn_posix
from pathlib import Path
from typing import NoReturn

import pytest

from keyshard import Checkpoint
from keyshard.broker.memory import Message as Stored
from keyshard.errors import ConfigError, HandlerProcessError
from tests.helpers import wait_until
from tests.support.deadlines import deadline
from tests.support.handled_topic import AT_ONCE, HandledTopic
from tests.support.process_handlers import (
    generates,
    has_arrow,
    its_pid,
    kills_itself,
    raises,
)

REPOSITORY = Path(__file__).parents[2]


def test_an_error_of_a_handler_in_a_process_keeps_its_meaning(
    orders: HandledTopic, tmp_path: Path
) -> None:
    bad = ["reject", "awaited", "returned", "secret", "other", "exit", "interrupt"]
    orders.cluster.publish(orders.topic, *[Stored(one.encode(), key=one) for one in bad])
    good = [f"good-{n}" for n in range(20)]
    orders.cluster.publish(
        orders.topic, *[Stored(str(tmp_path).encode(), key=key) for key in [*good, "later"]]
    )
    with orders.running(
        orders.source(), raises, executor="processes", workers=2, retry=AT_ONCE
    ) as run:
        wait_until(lambda: orders.errors or orders.backlog() == 0)
        assert not orders.errors, orders.errors
        counters = run.source.status()["counters"]
        parked = {one["key"] for one in run.source.status()["parked"]}
    assert counters["rejected"] == 3
    assert parked == {"secret", "other", "exit", "interrupt"}
    assert len(list(tmp_path.glob("done-*"))) == 21


def test_a_process_that_ends_while_it_is_idle_costs_no_message_an_attempt(
    orders: HandledTopic, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with orders.running(
        orders.source(), its_pid, executor="processes", workers=1, retry=AT_ONCE
    ) as run:
        for number in range(3):
            path = tmp_path / str(number)
            orders.cluster.publish(orders.topic, Stored(str(path).encode(), key="k"))
            wait_until(lambda: orders.errors or orders.backlog() == 0)
            assert not orders.errors, orders.errors
            os.kill(int(path.read_text()), signal.SIGKILL)
            wait_until(lambda: not alive(int(path.read_text())))  # noqa: B023
        counters = run.source.status()["counters"]
    assert (counters["completed"], counters["failedAttempts"]) == (3, 0)
    ended = "A handler process was killed by SIGKILL (9) while it waited for a message. If nobody"
    assert caplog.text.count(ended) == 2


def test_a_process_does_not_import_arrow_for_a_handler_that_decodes_nothing(
    orders: HandledTopic, tmp_path: Path
) -> None:
    path = tmp_path / "imported"
    orders.cluster.publish(orders.topic, Stored(str(path).encode(), key="k"))
    with orders.running(orders.source(), has_arrow, executor="processes", workers=1):
        wait_until(lambda: orders.errors or orders.backlog() == 0)
    assert path.read_text() == "False"


def test_a_handler_whose_process_is_killed_fails_with_the_signal(
    orders: HandledTopic, caplog: pytest.LogCaptureFixture
) -> None:
    orders.publish(keys=1, per_key=1)
    with orders.running(
        orders.source(), kills_itself, executor="processes", workers=1, retry=AT_ONCE
    ):
        wait_until(lambda: orders.errors or orders.backlog() == 0)
    assert not orders.errors, orders.errors
    assert "The handler process was killed by SIGKILL (9) while it handled" in caplog.text
    assert "memory limit" in caplog.text


def test_a_handler_that_processes_cannot_load_ends_the_source_with_the_import_error(
    orders: HandledTopic,
) -> None:
    module = types.ModuleType("only_here")
    exec("def handle(message): pass", module.__dict__)  # noqa: S102
    sys.modules["only_here"] = module
    count = orders.publish(keys=5, per_key=2)
    try:
        with pytest.raises(ConfigError, match=r"cannot load.*No module named 'only_here'"):
            orders.source().run(module.handle, executor="processes", workers=2)
    finally:
        del sys.modules["only_here"]
    assert orders.backlog() in (count, -1)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "Check the memory of this machine"),
        (
            FileNotFoundError(errno.ENOENT, "No such file", "/gone/python"),
            "Check that /gone/python exists",
        ),
    ],
)
def test_a_process_that_the_system_cannot_start_is_named(
    orders: HandledTopic, monkeypatch: pytest.MonkeyPatch, error: OSError, says: str
) -> None:
    def fails(*_: object) -> NoReturn:
        raise error

    count = orders.publish(keys=1, per_key=1)
    monkeypatch.setattr(popen_spawn_posix.Popen, "_launch", fails)
    with pytest.raises(HandlerProcessError, match="started no handler process") as caught:
        orders.source().run(raises, executor="processes", workers=1)
    assert caught.value.remedy.startswith(says)
    assert orders.backlog() in (count, -1)


def test_a_generator_of_a_process_is_refused_with_nothing_acknowledged(
    orders: HandledTopic,
) -> None:
    count = orders.publish(keys=5, per_key=2)
    with pytest.raises(ConfigError, match="generator"):
        orders.source().run(generates, executor="processes", workers=2)
    assert orders.backlog() == count


PROGRAM = """
import os, signal, sys, time, threading
from pathlib import Path

FOLDER = Path(sys.argv[1])

def handle(message):
    (FOLDER / f"began-{os.getpid()}").touch()
    time.sleep(float(sys.argv[2]))
    with (FOLDER / "handled").open("a") as file:
        file.write(message.key + "\\n")

def main():
    # Not at the top: processes of the handler import this program, and need none of it.
    from keyshard import KeyShardSource
    from keyshard.broker.memory import MemoryCluster, Message

    cluster = MemoryCluster.named("c")
    topic = cluster.create_topic("orders", partitions=2)
    cluster.publish(topic, *[Message(b"x", key=f"k{n}") for n in range(8)])
    source = KeyShardSource(
        topic, subscription="keyshard", service_url="memory://c", starting_position="earliest",
        parallelism=2,
    )
    def run():
        source.run(handle, **{"lanes": 2} | eval(sys.argv[3]))
        left = sum(cluster.backlog(where, "keyshard") for where in cluster.partitions(topic))
        letters = sum(cluster.backlog(where, "keyshard-parked")
                      for where in cluster.topics().get(topic + "-keyshard-DLQ", ()))
        print("left", left, "letters", letters, flush=True)
    if sys.argv[4] == "main":
        run()
    else:
        # A shell that starts the tests in the background has Ctrl-C ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Thread(target=run).start()
        while True:
            time.sleep(1)

if __name__ == "__main__":
    main()
"""


class Program:
    """A program of its own, in a group of processes of its own."""

    def __init__(self, folder: Path, seconds: float, options: str, thread: str = "main") -> None:
        self._folder = folder
        (folder / "program.py").write_text(PROGRAM)
        self.process = subprocess.Popen(
            [sys.executable, "program.py", str(folder), str(seconds), options, thread],
            cwd=folder, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def began(self, processes: int) -> list[int]:
        """Wait for handlers in so many processes; their ids."""
        wait_until(lambda: len(list(self._folder.glob("began-*"))) >= processes)
        return [int(path.name.removeprefix("began-")) for path in self._folder.glob("began-*")]

    def end(self) -> str:
        """Its output, after it has ended."""
        try:
            return self.process.communicate(timeout=deadline(30))[0]
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)

    def handled(self) -> int:
        path = self._folder / "handled"
        return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_group_lets_running_handlers_finish_and_parks_nothing(
    tmp_path: Path, number: int
) -> None:
    program = Program(tmp_path, 1.0, "{'executor': 'processes', 'workers': 2}")
    program.began(2)
    os.killpg(program.process.pid, number)
    result = program.end()
    handled = program.handled()
    assert f"left {8 - handled} letters 0" in result, result
    assert 2 <= handled < 8
    assert program.process.returncode == 0


def test_processes_die_with_their_parent_in_the_midst_of_a_message(tmp_path: Path) -> None:
    program = Program(tmp_path, 60.0, "{'executor': 'processes', 'workers': 2}")
    children = program.began(2)
    program.process.kill()
    program.end()
    wait_until(lambda: not any(map(alive, children)), deadline(10))


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.parametrize("executor", ["threads", "processes"])
def test_ctrl_c_in_the_main_thread_ends_a_source_that_runs_in_another(
    tmp_path: Path, executor: str
) -> None:
    url = f"{tmp_path}/checkpoint.json"
    options = f"{{'executor': {executor!r}, 'workers': 2, 'checkpoint': {url!r}}}"
    program = Program(tmp_path, 0.5, options, "thread")
    program.began(1)
    os.killpg(program.process.pid, signal.SIGINT)
    assert "KeyboardInterrupt" in program.end()
    committed = Checkpoint.from_json(Path(url).read_text())
    done = sum(len(state.delivered) for state in committed.partitions.values())
    assert 0 < program.handled() == done < 8, "what was handled is committed"


SCRIPT = """
from keyshard import KeyShardSource
from keyshard.broker.memory import MemoryCluster

def handle(message):
    pass

MemoryCluster.named("c").create_topic("orders")
source = KeyShardSource("orders", subscription="s", service_url="memory://c")
source.run(handle, executor="processes", workers=1)
"""


def test_a_script_without_a_main_guard_is_named(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, text=True, capture_output=True,
        timeout=deadline(60), env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "KEYSHARD_HANDLER_UNFIT" in done.stderr.splitlines()[-1]
    assert "__name__" in done.stderr.splitlines()[-2]
