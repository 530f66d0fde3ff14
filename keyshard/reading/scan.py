"""Reads a stretch of a topic partition, and proves which entries are absent.

All conclusions from the absence of an entry use a scan: a lost entry of a planned batch, an ack gap
that is resolved, the end of a bounded run, a dead letter.

A Reader that lost its connection may be silent for ever, or report its end in the middle of a
topic. So only a Reader that has stayed connected since it was opened proves anything. It proves
that all entries before a position are known in two cases:

- It returned an entry after the position.
- It had nothing left to return, and the broker then answered that nothing more is stored.

If a Reader loses its connection in a step, the result of the step is discarded, and another Reader
begins where the proof ends.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from types import TracebackType

from keyshard.broker.port import DEFAULT_READ_OPTIONS, OpensReaders, Reader, ReadOptions
from keyshard.broker.unreadable_entries import entry_of
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.errors import (
    BrokerError,
    BrokerUnavailableError,
    ChunkedMessageError,
    UnreadableEntryError,
)

READ_WAIT_MS = 200
"""Longest wait of a Reader for its next messages, milliseconds."""
SILENT_S = 5.0
"""Time after which a silent Reader is replaced, seconds: an undetected reconnect can make it wait
for ever."""

_log = logging.getLogger(__name__)


class Scan:
    """Steps through a stretch; a context manager.

    Args:
        broker: Connection for Readers.
        topic_partition: The topic partition.
        start: First position, inclusive.
        last: Last position, inclusive; ``None``: all that is stored.
        how: Options of the Readers.
        unreadable: Receives entries that cannot be read, which are then skipped; ``None``: they are
            errors.
    """

    def __init__(
        self,
        broker: OpensReaders,
        topic_partition: TopicPartition,
        start: EntryId,
        last: EntryId | None,
        how: ReadOptions = DEFAULT_READ_OPTIONS,
        *,
        unreadable: dict[EntryId, UnreadableEntryError] | None = None,
    ) -> None:
        self.position = start
        """All earlier entries were returned, or cannot be read."""
        self.done = False
        """Whether all entries of the stretch were returned, or cannot be read."""
        self._broker = broker
        self._topic_partition = topic_partition
        self._last = last
        self._how = replace(how, last=last)
        self._unreadable = unreadable
        self._reader: Reader | None = None
        self._progress_s = 0.0

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
        """Do one step: return the next blocks in position order; ``[]`` if nothing came.

        Blocks may lie after the stretch. An entry of several blocks may begin again.

        Raises:
            UnreadableEntryError: An entry cannot be read, and ``unreadable`` is ``None``.
            ChunkedMessageError: A message of the stretch is chunked.
            BrokerUnavailableError: The connection was lost; the next step uses another Reader
                (retriable).
            BrokerError: The broker refused.
        """
        if self.done:
            return []
        try:
            blocks, at_end = self._step()
        except (UnreadableEntryError, ChunkedMessageError) as exc:
            if self._last is not None and entry_of(exc) > self._last:
                self.position = max(self.position, entry_of(exc))
                self.done = True
                return []
            if self._unreadable is None or isinstance(exc, ChunkedMessageError):
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
            self._progress_s = now
            newest = blocks[-1]
            ledger, entry = newest.id
            self.position = EntryId(ledger, entry + newest.ends)
            at_end = self._last is not None and self.position > self._last
        elif now - self._progress_s > SILENT_S:
            self._close()
        self.done = at_end
        return blocks

    def _step(self) -> tuple[list[EntryBlock], bool]:
        """Return the next blocks, and whether nothing is left; fail if the connection was lost."""
        reader = self._reader
        if reader is None:
            reader = self._broker.reader(self._topic_partition, self.position, self._how)
            self._reader = reader
            self._progress_s = time.monotonic()
        refused: UnreadableEntryError | ChunkedMessageError | None = None
        blocks: list[EntryBlock] = []
        try:
            blocks = reader.read(READ_WAIT_MS)
        except (UnreadableEntryError, ChunkedMessageError) as exc:
            refused = exc
        at_end = not blocks and refused is None and reader.at_end()
        if not reader.stayed_connected():
            ledger, entry = self.position
            raise BrokerUnavailableError(
                f"A reader of {self._topic_partition} lost its connection at {ledger}:{entry}. "
                "The entries from there on are unknown.",
                "Check that the broker is running.",
            )
        if refused is not None:
            raise refused
        return blocks, at_end

    def _pass(self, entry_id: EntryId, error: UnreadableEntryError) -> None:
        assert self._unreadable is not None
        if entry_id < self.position:
            return
        self._unreadable[entry_id] = error
        self._progress_s = time.monotonic()
        self.position = EntryId(entry_id.ledger, entry_id.entry + 1)
        self.done = self._last is not None and self.position > self._last

    def _close(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            try:
                reader.close()
            except BrokerError as exc:
                # Its results are known, and a lost connection needs no close.
                _log.debug("a reader of %s: %s", self._topic_partition, exc.summary)
