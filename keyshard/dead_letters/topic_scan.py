"""Reads a dead-letter topic: folds it at a start, and reads messages for a replay."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from keyshard.base_error import one_line
from keyshard.broker.port import Broker, Consumer
from keyshard.broker.retry import retry_until
from keyshard.columns.messages import messages_of_each
from keyshard.config.source import SourceConfig
from keyshard.core.dead_letter import (
    PART,
    PARTS,
    PREFIX,
    DeadLetter,
    DeadLetterKind,
    DoneMarker,
    DoneUpToMarker,
    RunsAgainNote,
    is_of,
    oldest_of,
    parse,
    parts_of,
    position_text,
)
from keyshard.core.message import Message
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.dead_letters.topic_state import TopicState
from keyshard.errors import DataLossTrimmedError, ReplayTimeoutError, UnreadableEntryError
from keyshard.reading.scan import Scan

FIRST = EntryId(0, 0)
MALFORMED_MAX = 100_000
"""Maximum number of malformed messages that are counted."""
MALFORMED_CHARS_MAX = 200
"""Maximum number of characters of the reason why a message is malformed."""
_RESTS, _PASSES, _NOT_OURS, _BROKEN = "rests", "passes", "not ours", "broken"

_log = logging.getLogger(__name__)
Check = Callable[[], object]
"""Raises an error that is not retriable if the source has ended."""


def is_needed() -> None:
    """Raise nothing. The default check, for a read that the end of a source does not stop."""


def fold(
    broker: Broker,
    where: TopicPartition,
    state: TopicState,
    consumer: Consumer,
    config: SourceConfig,
    *,
    check: Check = is_needed,
) -> list[EntryId]:
    """Fold all stored messages from ``state.begin`` on.

    Afterwards ``state.claimed`` is a lost dead letter whose loss is accepted, or ``None``.

    Args:
        broker: Connection for Readers.
        where: The dead-letter topic.
        state: State to fold into.
        consumer: Knows the end of the topic.
        config: Options of the source.
        check: Called before each step; raises if the result is no longer needed.

    Returns:
        Entries that nothing needs any more.

    Raises:
        ReplayTimeoutError: Nothing came for ``replay_timeout_ms``.
        DataLossTrimmedError: Resting dead letters are gone; see :func:`lost_dead_letters`.
        BrokerError: The broker cannot be reached, or refused.
    """
    last = consumer.last_entry()
    start = state.begin or FIRST
    found: list[EntryId] = []
    needed: set[EntryId] = set()
    unreadable: dict[EntryId, UnreadableEntryError] = {}
    if last is not None and start <= last:
        with Scan(broker, where, start, last, unreadable=unreadable) as scan:
            for message in read(scan, where, config.replay_timeout_ms / 1000, check=check):
                position = position_of(message)
                found.append(position)
                taken = _take(state, message, config.subscription)
                if taken is _NOT_OURS:
                    continue
                if taken is _BROKEN:
                    needed.add(position)
                    continue
                state.claim(oldest_of(message))
                if message.properties.get(PARTS):
                    state.parts[position] = parts_of(message)
                if taken is _RESTS:
                    needed.add(position)
    for position, error in unreadable.items():
        state.passed(position)
        _malformed(state, position, error.message.partition(". ")[0])
    state.apply_sweeps()
    _name_malformed(state, where)
    claimed, state.claimed = state.claimed, None
    if claimed is not None and (not found or found[0] > claimed):
        lost_dead_letters(where, claimed, found[0] if found else None, config)
        state.claimed = claimed
    needed.update(at for parked in state.keys.values() for _, _, at in parked.dead_letters())
    state.parts = {at: entries for at, entries in state.parts.items() if at in needed}
    needed.update(*state.parts.values())
    return [position for position in found if position not in needed]


def _malformed(state: TopicState, position: EntryId, why: str) -> None:
    """Count a message that should be a dead letter or a marker."""
    if len(state.malformed) < MALFORMED_MAX:
        state.malformed[position] = why[:MALFORMED_CHARS_MAX]


def _name_malformed(state: TopicState, where: TopicPartition) -> None:
    """Log the number of malformed messages, and the first of them."""
    if not state.malformed:
        return
    first, why = next(iter(state.malformed.items()))
    _log.warning(
        "%d malformed dead letter%s in %s, first %s: %s. Malformed dead letters stay stored and "
        "unacknowledged, and are not replayed. Inspect them with a Reader. To remove them, "
        "acknowledge them on the subscription of the dead letters",
        len(state.malformed), "" if len(state.malformed) == 1 else "s", where,
        position_text(first), why,
    )  # fmt: skip


def stored_state(
    broker: Broker, where: TopicPartition, config: SourceConfig, *, check: Check = is_needed
) -> TopicState:
    """Fold all stored messages of a topic, without a subscription; raises as :func:`fold`."""
    state = TopicState()
    with Scan(broker, where, FIRST, None, unreadable={}) as scan:
        for message in read(scan, where, config.replay_timeout_ms / 1000, check=check):
            _take(state, message, config.subscription)
    state.apply_sweeps()
    return state


def lost_dead_letters(
    where: TopicPartition, claimed: EntryId, first: EntryId | None, config: SourceConfig
) -> None:
    """Report a resting dead letter that is no longer stored and that no marker calls done.

    Raises:
        DataLossTrimmedError: Unless ``fail_on_data_loss`` is false.
    """
    begins = "it is empty" if first is None else f"it begins at {position_text(first)}"
    error = DataLossTrimmedError(
        f"Dead letters of parked keys are no longer stored in {where}: the oldest was at "
        f"{position_text(claimed)}, and {begins}. Retention, TTL or another client removed them "
        "before their replay. Newer messages of their keys would overtake them.",
        "Restore the topic. To accept the loss, set fail_on_data_loss to false.",
        topic_partition=where.name,
        missing=position_text(claimed),
    )
    if config.fail_on_data_loss:
        raise error
    _log.warning("%s They are left out, because fail_on_data_loss is false.", error.summary)


def position_of(message: Message) -> EntryId:
    """Return the position of a message in the dead-letter topic."""
    return EntryId(message.message_id.ledger, message.message_id.entry)


def read(
    scan: Scan,
    where: TopicPartition,
    timeout_s: float,
    enough: Callable[[], bool] = lambda: False,
    *,
    check: Check = is_needed,
) -> Iterator[Message]:
    """Yield messages of a stretch, and others read with it; a message may come twice.

    Args:
        scan: Scan of the stretch.
        where: The dead-letter topic.
        timeout_s: Longest time without anything read, seconds.
        enough: Called after each read; ends the iteration if it returns true.
        check: Called before each read; raises if the messages are no longer needed.

    Raises:
        ReplayTimeoutError: Nothing came for ``timeout_s``.
    """

    def step() -> list[EntryBlock]:
        check()
        return scan.read()

    deadline = time.monotonic() + timeout_s
    while not scan.done:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise ReplayTimeoutError(
                f"Reading dead letters in {where} returned nothing for {timeout_s:g} s before its "
                "end.",
                "Check the load of the broker, or raise replay_timeout_ms.",
            )
        blocks = retry_until(step, left_s)
        if blocks:
            deadline = time.monotonic() + timeout_s
            for messages in messages_of_each([(where, block) for block in blocks]):
                yield from messages
        if enough():
            return


def is_finished(
    state: TopicState, message: Message, subscription: str, stored: EntryId | None
) -> bool:
    """Whether no source, running or started later, needs a received message of the topic.

    A part is never finished: only its dead letter tells whether it is needed.

    Args:
        state: State of the topic.
        message: A received message.
        subscription: Subscription of the source.
        stored: Position before which the stored checkpoint has folded every message; ``None``:
            none is stored.
    """
    position, folded = position_of(message), state.folded
    if folded is None or position >= folded:
        return False
    own = is_of(message, subscription)
    try:
        found = _checked(message)
    except ValueError:
        return not own
    if own and isinstance(found, DeadLetter):
        where, message_id = found.topic_partition, found.message.message_id
        return (
            found.kind is DeadLetterKind.PARKED
            and found.key is not None
            and not state.rests(found.key, where, message_id)
        )
    if own and message.properties.get(f"{PREFIX}kind") == PART:
        return False
    # A marker proves that a dead letter is done, not lost, until a checkpoint has folded it.
    return not own or (stored is not None and position < stored)


def _take(state: TopicState, message: Message, subscription: str) -> str:
    """Fold a message of the topic.

    Returns:
        ``_BROKEN``: malformed. ``_NOT_OURS``: not written by the source. ``_RESTS``: a dead letter
        whose kind is not ``PARKED``. ``_PASSES``: any other message of the source; the state knows
        whether a parked dead letter rests.
    """
    position, own = position_of(message), is_of(message, subscription)
    try:
        found = _checked(message)
    except ValueError as exc:
        state.passed(position)
        if own:
            _malformed(state, position, one_line(exc))
        return _BROKEN if own else _NOT_OURS
    if found is None or found.subscription != subscription:
        state.passed(position)
        return _PASSES if own else _NOT_OURS
    if isinstance(found, DoneMarker):
        state.replayed(position, found.key, found.topic_partition, found.message_id)
    elif isinstance(found, RunsAgainNote):
        state.run_again(position, found.key, found.topic_partition, found.message_id)
    elif isinstance(found, DoneUpToMarker):
        state.swept(position, found.key, found.up_to)
    elif found.kind is DeadLetterKind.PARKED and found.key is not None:
        written_ms = round(message.publish_time.timestamp() * 1000)
        where, message_id = found.topic_partition, found.message.message_id
        state.dead_letter(position, found.key, where, message_id, written_ms)
    else:
        state.passed(position)
        return _RESTS
    return _PASSES


def _checked(message: Message) -> DeadLetter | DoneMarker | RunsAgainNote | DoneUpToMarker | None:
    """Parse a message of the topic; raises ``ValueError`` if it is malformed."""
    found = parse(message)
    oldest_of(message)
    if isinstance(found, DeadLetter) and found.kind is DeadLetterKind.PARKED and found.key is None:
        raise ValueError("its key is parked, but it has no key")
    return found


def dead_letter_of(message: Message) -> DeadLetter | None:
    """Return the dead letter of a message, perhaps without its parts; ``None`` if it has none."""
    try:
        found = parse(message)
    except ValueError:
        return None
    return found if isinstance(found, DeadLetter) else None
