"""Reading a dead-letter topic: what a start finds in it, and the letters of a replay."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from keyshard.broker.port import Broker, Consumer
from keyshard.config import SourceConfig
from keyshard.core.entry import EntryId, TopicPartition
from keyshard.core.letters import Kind, Marker, parse
from keyshard.core.message import Message
from keyshard.core.parking import Parked
from keyshard.errors import ReplayTimeoutError
from keyshard.runtime.retry import retry_until
from keyshard.runtime.scan import Scan
from keyshard.schema.messages import messages_of

FIRST = EntryId(0, 0)

_log = logging.getLogger(__name__)


def fold(
    broker: Broker,
    where: TopicPartition,
    state: Parked,
    consumer: Consumer,
    config: SourceConfig,
) -> list[EntryId]:
    """Read what is stored and not folded yet.

    Args:
        broker: Connection for Readers.
        where: The dead-letter topic.
        state: What is known; knows everything afterwards. Folding again changes nothing.
        consumer: Knows the end of the topic.
        config: The source.

    Returns:
        Entries that are finished with.

    Raises:
        ReplayTimeoutError: It took longer than ``replay_timeout_ms``.
        BrokerError: The broker cannot be reached, or refused.
    """
    timeout_s = config.replay_timeout_ms / 1000
    last = consumer.last_entry()
    folded = state.folded
    if folded is not None:
        state.trimmed(_first_stored(broker, where, timeout_s))
    if last is None or (folded is not None and folded >= last):
        return []
    start = FIRST if folded is None else EntryId(folded.ledger, folded.entry + 1)
    stays: set[EntryId] = set()
    found: list[EntryId] = []
    with Scan(broker, where, start, last) as scan:
        for message in read(scan, where, timeout_s):
            found.append(position_of(message))
            if _take(state, message, config.subscription):
                stays.add(found[-1])
    stays.update(*(parked.resting for parked in state.keys.values()))
    return [position for position in found if position not in stays]


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
        timeout_s: Deadline for all of it, seconds.
        enough: Ends it after a read.
    """
    deadline = time.monotonic() + timeout_s
    while not scan.done:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise ReplayTimeoutError(
                f"Reading dead letters in {where} took longer than {timeout_s:g} "
                "s. Check the broker's load, acknowledge rejected letters, or raise "
                "replay_timeout_ms."
            )
        for block in retry_until(scan.read, left_s):
            yield from messages_of(where, block)
        if enough():
            return


def _first_stored(broker: Broker, where: TopicPartition, timeout_s: float) -> EntryId | None:
    """The first entry that is stored; ``None`` without one."""
    with Scan(broker, where, FIRST, None) as scan:
        found = next(read(scan, where, timeout_s), None)
    return None if found is None else position_of(found)


def _take(state: Parked, message: Message, subscription: str) -> bool:
    """Fold a message of the topic; whether it stays whatever is replayed."""
    position = position_of(message)
    try:
        found = parse(message)
    except ValueError as exc:
        _log.warning("message %s of %s is no letter: %s", message.message_id, message.topic, exc)
        found = None
    if found is None or found.subscription != subscription:
        state.passed(position)
    elif isinstance(found, Marker):
        state.replayed(position, found.key, found.up_to)
    elif found.kind is Kind.PARKED and found.key is not None:
        state.letter(position, found.key, found.topic_partition, found.message.message_id)
    else:
        state.passed(position)
        return True
    return False
