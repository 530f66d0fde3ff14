"""A program ends with its chosen status, also while its threads use the Pulsar client."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pulsar
import pytest

from keyshard.broker.client.broker import ClientBroker
from keyshard.config.connection import Connection
from tests.support.deadlines import deadline

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


@pytest.mark.parametrize("asked", ["subscribe", "partitions", "reader", "producer"])
@pytest.mark.parametrize(
    "thread_and_end", [("daemon", "closed"), ("daemon", "left open"), ("not daemon", "closed")]
)
def test_a_thread_that_waits_for_a_silent_broker_keeps_the_exit_status(
    asked: str, thread_and_end: tuple[str, str]
) -> None:
    # An end that waits for the request, which has an hour, is not in time.
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), asked, *thread_and_end],
        capture_output=True, text=True, timeout=END_S, check=False,
    )  # fmt: skip
    assert ended.returncode == STATUS, ended.stderr
    if thread_and_end[0] != "daemon":  # A daemon thread may end before it prints.
        assert ended.stdout.split() == ["BrokerError"]


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
