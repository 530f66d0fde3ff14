"""Reading a dead-letter topic: what a start finds in it, and the letters of a replay."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from keyshard.arrow.messages import messages_of_each
from keyshard.broker.port import Broker, Consumer
from keyshard.broker.retry import retry_until
from keyshard.config.source import SourceConfig
from keyshard.core.dead_letter.letters import (
    PART,
    PARTS,
    PREFIX,
    Letter,
    LetterKind,
    Marker,
    RunsAgain,
    Sweep,
    is_of,
    oldest_of,
    parse,
    parts_of,
    position_text,
)
from keyshard.core.dead_letter.parked import Parked
from keyshard.core.message import Message
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.errors import DataLossTrimmedError, ReplayTimeoutError, UnreadableEntryError
from keyshard.reading.scan import Scan

FIRST = EntryId(0, 0)
MALFORMED_MAX = 100_000
"""Malformed messages that are counted."""
MALFORMED_CHARS_MAX = 200
"""Most characters of why one is malformed."""
_STAYS, _PASSES, _NOT_OURS, _BROKEN = "stays", "passes", "not ours", "broken"

_log = logging.getLogger(__name__)


def fold(
    broker: Broker,
    where: TopicPartition,
    state: Parked,
    consumer: Consumer,
    config: SourceConfig,
) -> list[EntryId]:
    """Read what is stored and not folded yet.

    ``state.claimed`` is afterwards a letter that was lost, where that is accepted.

    Args:
        broker: Connection for Readers.
        where: The dead-letter topic.
        state: What is known; knows everything afterwards.
        consumer: Knows the end of the topic.
        config: The source.

    Returns:
        Entries that are finished with.

    Raises:
        ReplayTimeoutError: Nothing came for ``replay_timeout_ms``.
        DataLossTrimmedError: Letters that rested are gone; see :func:`lost_letters`.
        BrokerError: The broker cannot be reached, or refused.
    """
    last = consumer.last_entry()
    start = state.begin or FIRST
    found: list[EntryId] = []
    stays: set[EntryId] = set()
    unreadable: dict[EntryId, UnreadableEntryError] = {}
    if last is not None and start <= last:
        with Scan(broker, where, start, last, unreadable=unreadable) as scan:
            for message in read(scan, where, config.replay_timeout_ms / 1000):
                position = position_of(message)
                found.append(position)
                taken = _take(state, message, config.subscription)
                if taken is _NOT_OURS:
                    continue
                if taken is _BROKEN:
                    stays.add(position)
                    continue
                state.claim(oldest_of(message))
                if message.properties.get(PARTS):
                    state.parts[position] = parts_of(message)
                if taken is _STAYS:
                    stays.add(position)
    for position, error in unreadable.items():
        state.passed(position)
        _malformed(state, position, error.message.partition(". ")[0])
    state.settle()
    _name_malformed(state, where)
    claimed, state.claimed = state.claimed, None
    if claimed is not None and (not found or found[0] > claimed):
        lost_letters(where, claimed, found[0] if found else None, config)
        state.claimed = claimed
    stays.update(at for parked in state.keys.values() for _, _, at in parked.letters())
    state.parts = {at: entries for at, entries in state.parts.items() if at in stays}
    stays.update(*state.parts.values())
    return [position for position in found if position not in stays]


def _malformed(state: Parked, position: EntryId, why: str) -> None:
    """Count a message that should be a letter or a marker."""
    if len(state.malformed) < MALFORMED_MAX:
        state.malformed[position] = why[:MALFORMED_CHARS_MAX]


def _name_malformed(state: Parked, where: TopicPartition) -> None:
    """Log how many messages are malformed, and the first of them."""
    if not state.malformed:
        return
    first, why = next(iter(state.malformed.items()))
    _log.warning(
        "%d message%s of %s should be dead letters, but are malformed, first %s: %s. They stay "
        "stored and unacknowledged, and are not replayed. Look at them with a Reader; if nobody "
        "needs them, acknowledge them on the subscription that keeps the letters",
        len(state.malformed), "" if len(state.malformed) == 1 else "s", where,
        position_text(first), why,
    )  # fmt: skip


def has_parked(broker: Broker, where: TopicPartition, config: SourceConfig) -> bool:
    """Whether letters of parked keys of a source rest in a topic; raises as :func:`fold`."""
    state = Parked()
    with Scan(broker, where, FIRST, None, unreadable={}) as scan:
        for message in read(scan, where, config.replay_timeout_ms / 1000):
            _take(state, message, config.subscription)
    state.settle()
    return bool(state.keys)


def lost_letters(
    where: TopicPartition, claimed: EntryId, first: EntryId | None, config: SourceConfig
) -> None:
    """A letter rested, nothing says that it is done, and it is not stored any more.

    Raises:
        DataLossTrimmedError: Unless ``fail_on_data_loss`` is false.
    """
    begins = "it is empty" if first is None else f"it begins at {position_text(first)}"
    error = DataLossTrimmedError(
        f"Dead letters of parked keys are no longer stored in {where}: the oldest lay at "
        f"{position_text(claimed)}, and {begins}. Retention, TTL or somebody else removed them "
        "before they were replayed, and newer messages of their keys would overtake them. Restore "
        "the topic, or set fail_on_data_loss to false if the loss is accepted.",
        topic_partition=where.name,
        missing=position_text(claimed),
    )
    if config.fail_on_data_loss:
        raise error
    _log.warning("%s Left out, because fail_on_data_loss is false.", error)


def position_of(message: Message) -> EntryId:
    """Where a message lies in the dead-letter topic."""
    return EntryId(message.message_id.ledger, message.message_id.entry)


def read(
    scan: Scan,
    where: TopicPartition,
    timeout_s: float,
    enough: Callable[[], bool] = lambda: False,
) -> Iterator[Message]:
    """Messages of a stretch, and what was read with it; one may come twice.

    Args:
        scan: Reads it.
        where: The dead-letter topic.
        timeout_s: Longest time without anything read, seconds.
        enough: Ends it after a read.
    """
    deadline = time.monotonic() + timeout_s
    while not scan.done:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise ReplayTimeoutError(
                f"Reading dead letters in {where} brought nothing for {timeout_s:g} s before its "
                "end. Check the broker's load, or raise replay_timeout_ms."
            )
        blocks = retry_until(scan.read, left_s)
        if blocks:
            deadline = time.monotonic() + timeout_s
            for messages in messages_of_each([(where, block) for block in blocks]):
                yield from messages
        if enough():
            return


def is_finished(state: Parked, message: Message, subscription: str, stored: EntryId | None) -> bool:
    """Whether nothing needs a message of the topic that was received, whoever starts next.

    A part never is: only its letter tells whether it is needed.

    Args:
        state: What is known.
        message: It.
        subscription: Of the source.
        stored: Everything before it is folded in the checkpoint that is stored; ``None``: none is.
    """
    position, folded = position_of(message), state.folded
    if folded is None or position >= folded:
        return False
    own = is_of(message, subscription)
    try:
        found = _checked(message)
    except ValueError:
        return not own
    if own and isinstance(found, Letter):
        where, message_id = found.topic_partition, found.message.message_id
        return (
            found.kind is LetterKind.PARKED
            and found.key is not None
            and not state.rests(found.key, where, message_id)
        )
    if own and message.properties.get(f"{PREFIX}kind") == PART:
        return False
    # It proves that what a checkpoint says to rest is done, and not lost.
    return not own or (stored is not None and position < stored)


def _take(state: Parked, message: Message, subscription: str) -> str:
    """Fold a message of the topic; whether it is ours, and stays whatever is replayed."""
    position, own = position_of(message), is_of(message, subscription)
    try:
        found = _checked(message)
    except ValueError as exc:
        state.passed(position)
        if own:
            _malformed(state, position, str(exc))
        return _BROKEN if own else _NOT_OURS
    if found is None or found.subscription != subscription:
        state.passed(position)
        return _PASSES if own else _NOT_OURS
    if isinstance(found, Marker):
        state.replayed(position, found.key, found.topic_partition, found.message_id)
    elif isinstance(found, RunsAgain):
        state.run_again(position, found.key, found.topic_partition, found.message_id)
    elif isinstance(found, Sweep):
        state.swept(position, found.key, found.up_to)
    elif found.kind is LetterKind.PARKED and found.key is not None:
        written_ms = round(message.publish_time.timestamp() * 1000)
        where, message_id = found.topic_partition, found.message.message_id
        state.letter(position, found.key, where, message_id, written_ms)
    else:
        state.passed(position)
        return _STAYS
    return _PASSES


def _checked(message: Message) -> Letter | Marker | RunsAgain | Sweep | None:
    """Parse a message of the topic; raises ``ValueError`` if it is malformed."""
    found = parse(message)
    oldest_of(message)
    if isinstance(found, Letter) and found.kind is LetterKind.PARKED and found.key is None:
        raise ValueError("it is of a parked key, and has no key")
    return found


def letter_of(message: Message) -> Letter | None:
    """The letter that a message is, perhaps without its parts; ``None`` when it is none."""
    try:
        found = parse(message)
    except ValueError:
        return None
    return found if isinstance(found, Letter) else None
