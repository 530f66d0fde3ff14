"""A process that writes one batch, and may stop itself at a named moment of that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

import pulsar

from tests.helpers import wait_until
from tests.support.deadlines import deadline

Moment = Literal["", "opened", "probing", "sending", "confirmed"]
"""When the process stops itself (SIGSTOP); never if it is empty.

- opened: its producer is open, and has told the last known id; nothing was sent.
- probing: the message that shows whether all earlier ones are stored is about to be sent.
- sending: some entries count as sent, and their frames are not in the socket.
- confirmed: some entries are confirmed, and many are not.
"""
ENDS_S = deadline(90)
"""Longest time until a writer has ended, seconds."""
READ_MS = int(deadline(20) * 1000)
"""Longest wait for a message that is there, milliseconds."""
VALUE_BYTES = 200
PENDING_BYTES = 1 << 20
"""Most bytes without a confirmation, so a batch of several MB is never sent as a whole."""
_PROGRAM = """
import os, signal, sys
import pyarrow as pa
from keyshard import KeyShardSink
from keyshard.broker.unconfirmed import Unconfirmed
from keyshard.broker.wire.producer import WireProducer
from keyshard.errors import KeyShardError
from keyshard.publishing import batch_writer

url, topic, batch_id, rows, keys, entry, timeout_ms, moment, count = sys.argv[1:]
left = int(count)

def stop_before(owner, name, weight):
    inner = getattr(owner, name)
    def outer(*args, **options):
        global left
        before, left = left, left - weight(*args)
        if before > 0 >= left:
            os.kill(os.getpid(), signal.SIGSTOP)
        return inner(*args, **options)
    setattr(owner, name, outer)

if moment == "opened":
    stop_before(batch_writer, "publish_unless_cut", lambda *_: 1)
elif moment == "probing":
    stop_before(Unconfirmed, "next", lambda queue, _: queue.probing and queue.has_next)
elif moment == "sending":
    inner = Unconfirmed.next
    def counted(queue, bytes_max):
        global left
        found = inner(queue, bytes_max)
        before, left = left, left - len(found)
        if before > 0 >= left:
            os.kill(os.getpid(), signal.SIGSTOP)
        return found
    Unconfirmed.next = counted
elif moment == "confirmed":
    stop_before(WireProducer, "receipts", lambda _, commands: len(commands))

batch = pa.record_batch({
    "value": [b"%d:%d" % (int(batch_id), row) + b" " * SIZE for row in range(int(rows))],
    "__key": [f"k{row % int(keys)}" for row in range(int(rows))],
})
print("begins", flush=True)
try:
    with KeyShardSink(
        topic, sink_id="s", service_url=url, entry_messages_max=int(entry), compression="none",
        pending_bytes_max=PENDING, send_timeout_ms=int(timeout_ms),
    ) as sink:
        report = sink.write_batch(batch, int(batch_id))
        print("wrote", report.rows, report.already_stored, flush=True)
except KeyShardError as exc:
    print("failed", exc.code, exc.retriable, exc.message, flush=True)
""".replace("SIZE", str(VALUE_BYTES)).replace("PENDING", str(PENDING_BYTES))


@dataclass(frozen=True)
class Batch:
    """A batch of rows ``0`` to ``rows - 1``, of which every ``keys``-th has the same key."""

    id: int
    rows: int
    keys: int = 20


PARTITIONS = 2
"""Topic partitions of the topics that are written to."""
BATCH = Batch(3, rows=20_000)
MIDDLE = 700
"""Confirmed entries of the 4,000 of the batch, when a writer stops in the middle."""
WROTE = ["wrote", str(BATCH.rows)]


def expected_rows(*batches: Batch) -> dict[str, list[tuple[int, int]]]:
    """Batch and row of all messages by key, where each row of the batches is stored once."""
    found: dict[str, list[tuple[int, int]]] = {}
    for batch in batches:
        for key in range(batch.keys):
            rows = [(batch.id, row) for row in range(key, batch.rows, batch.keys)]
            found.setdefault(f"k{key}", []).extend(rows)
    return found


class Writer:
    """A process that writes a batch to a topic with the sink id ``s``, and partition 0.

    As a context manager, it is killed at the end.

    Args:
        url: URL of the broker.
        topic: The topic.
        batch: The batch.
        entry: Most messages of an entry.
        moment: When it stops itself.
        count: How many entries are sent or confirmed then.
        timeout_ms: Its timeout of a message, milliseconds.
    """

    def __init__(
        self,
        url: str,
        topic: str,
        batch: Batch,
        *,
        entry: int = 5,
        moment: Moment = "",
        count: int = 1,
        timeout_ms: int = 60_000,
    ) -> None:
        numbers = (batch.id, batch.rows, batch.keys, entry, timeout_ms)
        arguments = [url, topic, *map(str, numbers), moment, str(count)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *arguments], stdout=subprocess.PIPE, text=True
        )

    def is_stopped(self) -> bool:
        """Whether it is stopped now; fails if it has ended."""
        found = os.waitid(
            os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT
        )
        assert found is None or found.si_code == os.CLD_STOPPED, "the writer ended too early"
        return found is not None

    def wait_until_stopped(self) -> None:
        """Wait until it has stopped itself, or was stopped."""
        wait_until(self.is_stopped, ENDS_S)

    def stop(self) -> None:
        """Stop it (SIGSTOP), and wait until it is stopped."""
        self._process.send_signal(signal.SIGSTOP)
        self.wait_until_stopped()

    def go_on(self) -> None:
        """Let it continue (SIGCONT)."""
        self._process.send_signal(signal.SIGCONT)

    def outcome(self) -> list[str]:
        """Wait for its end; return ``wrote``, rows and known rows, or ``failed``, code and text."""
        output, _ = self._process.communicate(timeout=ENDS_S)
        assert self._process.returncode == 0
        return str(output).splitlines()[-1].split(" ", 3)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """End it (SIGKILL). Idempotent."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def stored_rows(url: str, topic: str) -> dict[str, list[tuple[int, int]]]:
    """Batch and row of all messages by key, as the Reader of pulsar-client sees them."""
    found: dict[str, list[tuple[int, int]]] = {}
    with closing(
        pulsar.Client(url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    ) as client:
        for number in range(PARTITIONS):
            reader = client.create_reader(f"{topic}-partition-{number}", pulsar.MessageId.earliest)
            while reader.has_message_available():
                one = reader.read_next(READ_MS)
                batch, row = map(int, one.data().split(b":"))
                found.setdefault(one.partition_key(), []).append((batch, row))
            reader.close()
    return found


def check_once(url: str, topic: str, *batches: Batch) -> None:
    """Every row of the batches is stored once, in order per key, and a repetition knows it."""
    assert stored_rows(url, topic) == expected_rows(*batches)
    last = batches[-1]
    with Writer(url, topic, last, entry=3) as again:
        assert again.outcome() == ["wrote", str(last.rows), str(last.rows)]
    assert stored_rows(url, topic) == expected_rows(*batches)
