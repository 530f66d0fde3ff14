"""A program ends with its chosen status, also while its threads use the Pulsar client."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Iterator

import pulsar
import pytest

from keyshard.broker.client.broker import ClientBroker
from keyshard.config.connection import Connection
from tests.support.deadlines import deadline
from tests.support.programs import started

STATUS = 3
END_S = deadline(60)

PROGRAM = """
import logging, socket, sys, threading, time
from keyshard.broker.port import StartPosition, SubscriptionSpec
from keyshard import Connection
from keyshard.broker.client.broker import ClientBroker
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.ring.hash_range import split_ring

logging.disable()
silent = socket.create_server(("127.0.0.1", 0))  # takes connections and never answers
url = f"pulsar://127.0.0.1:{silent.getsockname()[1]}"
broker = ClientBroker(Connection(url, operation_timeout_ms=3_600_000))
where = TopicPartition("persistent://public/default/t")
ask = {
    "subscribe": lambda: broker.subscribe(
        SubscriptionSpec(where, "s", split_ring(1)[0], "c", receiver_queue_size=1),
        StartPosition.EARLIEST,
    ),
    "partitions": lambda: broker.partitions(where.topic),
    "reader": lambda: broker.reader(where, EntryId(0, 0)),
    "producer": lambda: broker.producer(where, send_timeout_ms=60_000),
}[sys.argv[1]]

def asking():
    began.set()
    try:
        ask()
    except Exception as exc:
        print(type(exc).__name__, flush=True)

began = threading.Event()
thread = threading.Thread(target=asking, daemon=sys.argv[2] == "daemon")
thread.start()
began.wait()
time.sleep(0.3)
if sys.argv[3] == "closed":
    broker.close()

class Slow:  # an end that takes a moment, in which threads come back from where they are
    def __del__(self):
        time.sleep(0.3)

slow = Slow()
sys.exit(3)
"""


ASKED = ("subscribe", "partitions", "reader", "producer")
ENDS = (("daemon", "closed"), ("daemon", "left open"), ("not daemon", "closed"))


@pytest.fixture(scope="module")
def programs() -> Iterator[dict[tuple[str, str, str], subprocess.Popen[str]]]:
    """All programs, by their arguments; each waits most of its time, so they run at once."""
    every = ((asked, *end) for asked, end in itertools.product(ASKED, ENDS))
    with started({arguments: (PROGRAM, *arguments) for arguments in every}) as processes:
        yield processes


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("thread_and_end", ENDS)
def test_a_thread_that_waits_for_a_silent_broker_keeps_the_exit_status(
    asked: str,
    thread_and_end: tuple[str, str],
    programs: dict[tuple[str, str, str], subprocess.Popen[str]],
) -> None:
    # An end that waits for the request, which has an hour, is not in time.
    arguments = (asked, *thread_and_end)
    ended = programs[arguments]
    output, errors = ended.communicate(timeout=END_S)
    assert ended.returncode == STATUS, errors
    if thread_and_end[0] != "daemon":  # A daemon thread may end before it prints.
        assert output.split() == ["BrokerError"]


@pytest.mark.parametrize("error", [pulsar.NotConnected, pulsar.BrokerMetadataError])
def test_a_connection_that_is_lost_while_it_is_closed_is_closed(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = ClientBroker(Connection("pulsar://127.0.0.1:1"))
    close = broker._client.close

    def lost() -> None:
        close()
        raise error("lost meanwhile")

    monkeypatch.setattr(broker._client, "close", lost)
    broker.close()
