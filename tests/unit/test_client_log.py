"""The log of the C++ client: few lines, of ``keyshard.client``, and nothing on the console."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from subprocess import CompletedProcess

import pytest

from keyshard.broker.client.log import EVERY_S, KINDS_MAX, Repeats
from tests.support.deadlines import deadline
from tests.support.programs import started

FAILED = "2026-01-02 03:04:05.678 ERROR [14] ClientConnection:485 | [x -> y] Failed: refused"


def test_a_kind_of_line_is_logged_once_and_then_counted() -> None:
    repeats = Repeats()
    assert repeats.take(10.0, FAILED) == ["ClientConnection:485: [x -> y] Failed: refused"]
    assert repeats.take(11.0, FAILED) == []
    assert repeats.take(12.0, FAILED.replace("refused", "no route")) == []
    assert repeats.take(12.0, FAILED.replace("485", "99")) == [
        "ClientConnection:99: [x -> y] Failed: refused"
    ]
    assert repeats.due(9.9 + EVERY_S) == []
    [text] = repeats.due(10.0 + EVERY_S)
    assert text.startswith("ClientConnection:485: [x -> y] Failed: no route (2 similar")
    assert repeats.take(11.0 + EVERY_S, FAILED) == []
    # Kinds that stopped are forgotten, and logged when they come again.
    assert repeats.due(12.0 + EVERY_S) == []
    assert repeats.take(13.0 + EVERY_S, FAILED.replace("485", "99")) != []


def test_unknown_lines_of_the_client_are_reported_and_kinds_have_a_limit() -> None:
    repeats = Repeats()
    assert repeats.take(0.0, "what is this") == ["client: what is this"]
    assert repeats.take(0.0, "\ufffd\0") == []
    for number in range(10 * KINDS_MAX):
        assert repeats.take(0.0, FAILED.replace("485", str(number)))
    assert len(repeats._kinds) <= KINDS_MAX


BEGIN = """
import logging, os, sys, time
shown = "%(process)d %(levelname)s %(name)s %(message)s"
logging.basicConfig(stream=sys.stderr, format=shown)
import pulsar
from keyshard.broker.client import log
from keyshard.broker.client.log import close_client, open_client

def ask(client):
    try:
        client.get_topic_partitions("t")
    except pulsar.PulsarException:
        pass

URL = "pulsar://127.0.0.1:1"
"""
PROGRAMS = {
    "shared": """
clients = [open_client(URL, operation_timeout_seconds=1) for _ in range(3)]
for client in clients:
    ask(client)
    close_client(client)
again = open_client(URL, operation_timeout_seconds=1)
ask(again)
close_client(again)
import threading
print([one.name for one in threading.enumerate()])
""",
    "emptied": """
log.FILE_BYTES_MAX = 200
client = open_client(URL, operation_timeout_seconds=3)
ask(client)
ask(client)
size = os.fstat(log._OURS._file).st_size
print(size < 1_500, log._OURS._position <= size)
close_client(client)
""",
    "forked": """
parent = open_client(URL, operation_timeout_seconds=1)
ask(parent)
child = os.fork()
if not child:
    own = open_client(URL, operation_timeout_seconds=1)
    ask(own)
    close_client(own)
    print(os.getpid(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
close_client(parent)
print(os.getpid())
""",
    "secret": """
for url in ("pulsar://ann:s3cret@127.0.0.1:1", "pulsar://127.0.0.1:1?token=s3cret"):
    try:
        client = open_client(url, operation_timeout_seconds=1)
    except Exception:
        continue
    ask(client)
    close_client(client)
""",
}
"""Processes of their own, because the client has one logger for a process."""


@pytest.fixture(scope="module")
def ended() -> Iterator[Callable[[str], CompletedProcess[str]]]:
    """The end of a program. All wait most of their time for the client, so they run at once."""
    with started({name: (BEGIN + program,) for name, program in PROGRAMS.items()}) as processes:

        def end(name: str) -> CompletedProcess[str]:
            process = processes[name]
            output, errors = process.communicate(timeout=deadline(60))
            assert process.returncode == 0, errors
            return CompletedProcess(process.args, 0, output, errors)

        yield end


def test_several_clients_share_a_log_and_the_console_stays_empty(
    ended: Callable[[str], CompletedProcess[str]],
) -> None:
    done = ended("shared")
    assert done.stdout == "['MainThread']\n"
    lines = done.stderr.splitlines()
    assert 2 <= len(lines) <= 8, done.stderr
    assert all(" WARNING keyshard.client " in line for line in lines)
    assert any("Connection refused" in line and " similar since" in line for line in lines)


def test_the_file_is_emptied_and_a_client_continues_writing(
    ended: Callable[[str], CompletedProcess[str]],
) -> None:
    done = ended("emptied")
    assert done.stdout == "True True\n"
    assert re.search(r"Connection refused \((\d+) similar", done.stderr)


def test_a_forked_process_logs_its_own_lines(ended: Callable[[str], CompletedProcess[str]]) -> None:
    done = ended("forked")
    child, parent = done.stdout.split()
    output = [line.split()[0] for line in done.stderr.splitlines()]
    assert set(output) == {child, parent}


def test_no_secret_of_a_url_is_shown(ended: Callable[[str], CompletedProcess[str]]) -> None:
    done = ended("secret")
    assert "s3cret" not in done.stderr + done.stdout
