"""Reads a stretch of a topic partition, and tells what is there from what is proved not to be.

Everything that concludes from an entry's absence goes through here: a lost entry of a planned
batch, a hole that is settled, the end of a bounded run, a dead letter. A Reader that lost its
connection may be silent for ever, or say that it is at the end in the middle of a topic. So only a
Reader whose connection has stood since it was opened proves anything: it handed out something
behind a position, or had nothing more to hand out and then got the broker's answer that nothing
more is stored. Whatever it did in a step in which it lost its connection is forgotten, and another
Reader begins where the proof ends.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from types import TracebackType

from keyshard.broker.port import ANYHOW, Broker, HowToRead, Reader
from keyshard.broker.refused_entries import entry_of
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.errors import BrokerError, BrokerUnavailableError, UnreadableEntryError

READ_WAIT_MS = 200
"""One wait for the next messages of a Reader, milliseconds."""
SILENT_S = 5.0
"""Time after which a Reader that owes something is replaced: a reconnect that nobody saw can make
it wait for ever, seconds."""

_log = logging.getLogger(__name__)


class Scan:
    """A context manager; steps through a stretch as often as its owner has time.

    Args:
        broker: Connection to read through.
        topic_partition: What is read.
        start: First position, inclusive.
        last: Last position, inclusive; ``None``: all that is stored.
        how: What its Readers may leave out.
        unreadable: Where entries go that cannot be read, which are passed then; ``None``: they are
            errors.
    """

    def __init__(
        self,
        broker: Broker,
        topic_partition: TopicPartition,
        start: EntryId,
        last: EntryId | None,
        how: HowToRead = ANYHOW,
        *,
        unreadable: dict[EntryId, UnreadableEntryError] | None = None,
    ) -> None:
        self.position = start
        """What lies before it was handed out, or nobody can read it."""
        self.done = False
        """Whether that is so of the whole stretch."""
        self._broker = broker
        self._topic_partition = topic_partition
        self._last = last
        self._how = replace(how, last=last)
        self._unreadable = unreadable
        self._reader: Reader | None = None
        self._heard_s = 0.0

    def __enter__(self) -> Scan:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()

    def read(self) -> list[EntryBlock]:
        """One step: what comes next, in position order; ``[]`` when nothing came.

        It may go beyond the stretch. An entry of several blocks may begin again.

        Raises:
            UnreadableEntryError: An entry cannot be read, and is not to be passed.
            BrokerUnavailableError: The connection was lost; the next step goes on with another
                Reader (retriable).
            BrokerError: The broker refused.
        """
        if self.done:
            return []
        try:
            blocks, at_end = self._step()
        except UnreadableEntryError as exc:
            if self._last is not None and entry_of(exc) > self._last:
                self.done = True
                return []
            if self._unreadable is None:
                self._close()
                raise
            self._pass(entry_of(exc), exc)
            return []
        except BaseException:
            self._close()
            raise
        blocks = [block for block in blocks if block.id >= self.position]
        now = time.monotonic()
        if blocks:
            self._heard_s = now
            (ledger, entry), newest = blocks[-1].id, blocks[-1]
            whole = newest.indices[-1] == newest.batch_size - 1
            self.position = EntryId(ledger, entry + whole)
            at_end = self._last is not None and self.position > self._last
        elif now - self._heard_s > SILENT_S:
            self._close()
        self.done = at_end
        return blocks

    def _step(self) -> tuple[list[EntryBlock], bool]:
        """What came; if nothing did, whether nothing is left. Both while the connection stood."""
        reader = self._reader
        if reader is None:
            reader = self._broker.reader(self._topic_partition, self.position, self._how)
            self._reader = reader
            self._heard_s = time.monotonic()
        refused: UnreadableEntryError | None = None
        blocks: list[EntryBlock] = []
        try:
            blocks = reader.read(READ_WAIT_MS)
        except UnreadableEntryError as exc:
            refused = exc
        at_end = not blocks and refused is None and reader.at_end()
        if not reader.stayed_connected():
            ledger, entry = self.position
            raise BrokerUnavailableError(
                f"A Reader of {self._topic_partition} lost its connection at {ledger}:{entry}. "
                "What is stored from there on is not known. Check that the broker is running."
            )
        if refused is not None:
            raise refused
        return blocks, at_end

    def _pass(self, entry_id: EntryId, error: UnreadableEntryError) -> None:
        assert self._unreadable is not None
        if entry_id < self.position:
            return
        self._unreadable[entry_id] = error
        self._heard_s = time.monotonic()
        self.position = EntryId(entry_id.ledger, entry_id.entry + 1)
        self.done = self._last is not None and self.position > self._last

    def _close(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            try:
                reader.close()
            except BrokerError as exc:
                # What it read is known; a connection that is gone has nothing left to close.
                _log.debug("a Reader of %s: %s", self._topic_partition, exc)
