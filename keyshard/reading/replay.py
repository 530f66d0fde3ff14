"""Reads exactly the entries of a planned batch again, with plain Readers.

The entries are unacknowledged, so the broker still stores them. A replay does not wait for
redelivery.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Container, Iterator, Mapping
from functools import partial

from keyshard.broker.port import Broker, ReadOptions
from keyshard.broker.retry import retry_until
from keyshard.columns.entry_rows import only
from keyshard.core.position.checkpoint import Checkpoint, PartitionCheckpoint
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.position.entry_assembly import EntryAssembly, RedeliveryNeeded
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.topic_identity import check_delivered
from keyshard.errors import (
    BrokerUnavailableError,
    DataLossTrimmedError,
    KeyShardError,
    ReplayTimeoutError,
    TopicNotFoundError,
    UnreadableEntryError,
)
from keyshard.reading.scan import Scan
from keyshard.threads import Pool

GAP_ENTRIES_MAX = 2_000
"""Longest gap between runs that a Reader reads; for a longer one, a new Reader is opened after
it."""
LOOKS = 2
"""Readers in a row that must not return an entry before it counts as lost."""
THREADS_MAX = 4
"""Topic partitions that are read in parallel."""

_log = logging.getLogger(__name__)


def replay(
    broker: Broker,
    checkpoint: Checkpoint,
    timeout_s: float,
    gone: Container[TopicPartition] = (),
    *,
    fail_on_data_loss: bool = True,
    columns: Collection[str] | None = None,
) -> dict[TopicPartition, list[EntryBlock]]:
    """Read the batch of ``checkpoint`` again.

    Args:
        broker: Connection for Readers.
        checkpoint: End checkpoint of the batch; its ``batch`` and ``partial`` name the entries.
        timeout_s: Deadline of the replay, seconds.
        gone: Topic partitions that no longer exist: a Reader would create them again.
        fail_on_data_loss: Whether missing entries are an error. If not, they are omitted with a
            warning.
        columns: As in :class:`~keyshard.broker.port.ReadOptions`.

    Returns:
        The entries of the batch per topic partition, ascending; partial ones with the indices that
        the checkpoint names.

    Raises:
        DataLossTrimmedError: The broker no longer stores some of the entries, or their topic.
        UnreadableEntryError: An entry can no longer be read.
        TopicRecreatedError: The broker stores other entries under their ids.
        ReplayTimeoutError: The deadline passed (retriable).
        BrokerUnavailableError: The connection was lost, and did not come back before the deadline
            (retriable).
    """
    deadline = time.monotonic() + timeout_s
    wanted = {tp: state for tp, state in checkpoint.partitions.items() if state.batch}
    unreadable: dict[TopicPartition, dict[EntryId, UnreadableEntryError]] = {}
    for tp in wanted:
        unreadable[tp] = {}
    read_partition = partial(_replay_partition, how=ReadOptions(columns=columns))
    with Pool(THREADS_MAX, "keyshard-replay") as pool:
        futures = {
            tp: pool.submit(
                read_partition,
                None if tp in gone else broker,
                tp,
                state,
                deadline,
                unreadable[tp],
            )
            for tp, state in wanted.items()
        }
        found = {tp: future.result() for tp, future in futures.items()}
    for tp, blocks in found.items():
        for block in blocks:
            check_delivered(tp, wanted[tp].published_ms, block)
        missing = wanted[tp].batch - EntrySet.of(block.id for block in blocks)
        if missing:
            unread = (exc for entry_id, exc in unreadable[tp].items() if entry_id in missing)
            loss: KeyShardError = next(unread, None) or _trimmed(tp, missing)
            if fail_on_data_loss:
                raise loss
            _log.warning("%s They are left out, because fail_on_data_loss is false.", loss.summary)
    return found


def _replay_partition(
    broker: Broker | None,
    topic_partition: TopicPartition,
    state: PartitionCheckpoint,
    deadline: float,
    unreadable: dict[EntryId, UnreadableEntryError],
    *,
    how: ReadOptions,
) -> list[EntryBlock]:
    """Read the entries of one topic partition; ``unreadable`` gets those that fail."""
    found: dict[EntryId, EntryBlock] = {}
    for _ in range(0 if broker is None else LOOKS):
        for stretch in stretches(state.batch - EntrySet.of(found)):

            def read_stretch(stretch: EntrySet = stretch) -> list[EntryBlock]:
                assert broker is not None
                return _read_stretch(
                    broker, topic_partition, stretch, state.partial, deadline,
                    how=how, unreadable=unreadable,
                )  # fmt: skip

            try:
                blocks = retry_until(read_stretch, max(0.0, deadline - time.monotonic()))
            except TopicNotFoundError as exc:
                _log.info("a planned batch has entries of a deleted topic: %s", exc.summary)
                break
            for block in blocks:
                indices = state.partial.get(block.id)
                found[block.id] = block if indices is None else only(block, indices)
    return [found[entry_id] for entry_id in sorted(found)]


def _trimmed(topic_partition: TopicPartition, missing: EntrySet) -> DataLossTrimmedError:
    return DataLossTrimmedError(
        f"{len(missing)} entries of a planned batch are no longer stored in {topic_partition}, "
        f"first {str(missing)[:80]}. Retention, TTL or a deleted topic removed them before the "
        "batch was committed.",
        "Restore the topic. To accept the loss, set fail_on_data_loss to false.",
        topic_partition=topic_partition.name,
        missing=str(missing),
    )


def _read_stretch(
    broker: Broker,
    topic_partition: TopicPartition,
    stretch: EntrySet,
    partial: Mapping[EntryId, Collection[int]],
    deadline: float,
    *,
    how: ReadOptions,
    unreadable: dict[EntryId, UnreadableEntryError],
) -> list[EntryBlock]:
    """Read the entries of a stretch, with all indices that the checkpoint names."""
    start, last = stretch.first, stretch.last
    assert start is not None
    assert last is not None
    found: dict[EntryId, EntryBlock] = {}
    cut_off: set[EntryId] = set()
    with Scan(broker, topic_partition, start, last, how, unreadable=unreadable) as scan:
        for block in _entries(scan, topic_partition, deadline, cut_off):
            if block.id in stretch:
                found[block.id] = block
    for entry_id, block in found.items():
        wanted = partial.get(entry_id, range(block.batch_size))
        if set(wanted) <= set(block.indices):
            cut_off.discard(entry_id)
        else:
            cut_off.add(entry_id)
    if any(entry_id in stretch for entry_id in cut_off):
        first = min(cut_off)
        raise BrokerUnavailableError(
            f"A reader of {topic_partition} lost its connection inside entry "
            f"{first.ledger}:{first.entry}.",
            "Check that the broker is running.",
        )
    return list(found.values())


def stretches(entries: EntrySet) -> Iterator[EntrySet]:
    """Split a set into parts for one Reader each: runs with small gaps in one ledger."""
    part: list[tuple[int, int, int]] = []
    for ledger, first, last in entries.runs():
        if part and (ledger != part[-1][0] or first - part[-1][2] > GAP_ENTRIES_MAX):
            yield EntrySet.of_runs(part)
            part = []
        part.append((ledger, first, last))
    if part:
        yield EntrySet.of_runs(part)


def _entries(
    scan: Scan, topic_partition: TopicPartition, deadline: float, cut_off: set[EntryId]
) -> Iterator[EntryBlock]:
    """Read the entries of a stretch, and some after it; an entry may come twice.

    Entries that end before their last index are added to ``cut_off``. If a Reader reconnects inside
    an entry, it starts the entry again, so it may still come complete.
    """
    assembly = EntryAssembly()
    while not scan.done:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise ReplayTimeoutError(
                f"Reading a planned batch of {topic_partition} again took too long (at "
                f"{scan.position.ledger}:{scan.position.entry}).",
                "Check the load of the broker, or raise replay_timeout_ms.",
            )
        for block in retry_until(scan.read, left_s):
            yield from _completed_by(assembly, block, cut_off)


def _completed_by(
    assembly: EntryAssembly, block: EntryBlock, cut_off: set[EntryId]
) -> list[EntryBlock]:
    try:
        return assembly.add(block)
    except RedeliveryNeeded as need:
        cut_off.add(need.entry_id)
        return assembly.add(block)
