"""The dead-letter topic of a source: what is written to it, and read back from it.

A subscription of its own, ``<subscription>-parked``, keeps the letters; see
:mod:`keyshard.dead_letter.keeper`. Its only consumer holds the whole ring, so that two sources
cannot park in one topic as the same subscription, and acknowledges what is finished with: letters
that were replayed, markers, and whatever is neither. Rejected letters and dead letters of keys that
went on stay until somebody acknowledges them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from operator import itemgetter
from typing import Any, TypeVar

from keyshard.broker.port import Broker, Producer
from keyshard.broker.retry import retry_until
from keyshard.config.source import SourceConfig
from keyshard.core.dead_letter.letters import (
    HEAD,
    NOTED,
    OLDEST,
    PART,
    PARTS,
    PREFIX,
    Letter,
    LetterKind,
    Marker,
    Resting,
    RunsAgain,
    Sweep,
    parse,
    parts_of,
    position_text,
    unpacked,
)
from keyshard.core.dead_letter.parked import Parked
from keyshard.core.dead_letter.parking import Parking, State
from keyshard.core.dead_letter.selection import Selection
from keyshard.core.message import Message, MessageId
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.dead_letter.keeper import LetterKeeper
from keyshard.dead_letter.reading import FIRST, fold, is_finished, position_of, read
from keyshard.dead_letter.replay import Replay
from keyshard.dead_letter.returns import LetterReturns
from keyshard.errors import (
    BrokerError,
    BrokerUnavailableError,
    DataLossTrimmedError,
    MessageTooLargeError,
    RangeConflictError,
)
from keyshard.reading.replay import stretches
from keyshard.reading.scan import Scan

ACKNOWLEDGE_AT_ONCE_MAX = 1_000
"""Entries acknowledged in one call while the topic is read at the start."""

SENT_AT_ONCE = 32
"""Markers that wait for their confirmation at the same time while letters are given up."""

PART_BYTES = 1024 * 1024
"""Size of the parts of a letter that is too large; a quarter where that is still too large."""
PART_BYTES_MIN = 4 * 1024
"""No smaller parts than this are tried."""
NEAR_BYTES_MAX = 16 * 1024 * 1024
"""Most memory of letters that were read beside those of another key, bytes."""
LETTER_BYTES = 1_000
"""About what a letter takes beside its value, bytes."""

Sent = TypeVar("Sent")

_log = logging.getLogger(__name__)


class DeadLetters:
    """Made by :func:`open_dead_letters`. Any thread may call it; every wait has a deadline.

    Args:
        broker: Connection to write and read through.
        topic_partition: The dead-letter topic.
        config: The source.
        keeper: Holds the subscription that keeps the letters.
        parked: What the topic says.
        checkpointed: Whether :meth:`saved` will be called.
        stored: Everything before it is folded in the checkpoint that is stored.
    """

    def __init__(
        self,
        broker: Broker,
        topic_partition: TopicPartition,
        config: SourceConfig,
        keeper: LetterKeeper,
        parked: Parked,
        *,
        checkpointed: bool = False,
        stored: EntryId | None = None,
    ) -> None:
        self.topic_partition = topic_partition
        self.parking = Parking(parked)
        self.lock = threading.Condition()
        """Guards :attr:`parking`; told when something is confirmed."""
        self._broker = broker
        self._config = config
        self._keeper = keeper
        self._producer: Producer | None = None
        self._producer_lock = threading.Lock()
        self._stopping = threading.Event()
        self._checkpointed = checkpointed
        self._finished_with: list[EntryId] = []
        self._saving: list[EntryId] = []
        self._stored = stored
        self._storing: EntryId | None = None
        self._returns: LetterReturns | None = None
        self._near: dict[EntryId, Letter] = {}
        self._near_bytes = 0
        if keeper.consumer is not None:
            self._returns = LetterReturns(keeper.consumer, self._came_again)

    # -- writing ----------------------------------------------------------------------------------

    def send(self, letter: Letter) -> None:
        """Write a letter; returns when it is confirmed, and then its message counts as completed.

        The key of a parked message is parked from now on. One that has a letter already is not
        written again.

        Raises:
            BrokerUnavailableError: No confirmation before ``acknowledge_timeout_ms``. The letter
                may be stored all the same; the message must stay unacknowledged.
            BrokerError: The broker refused it.
        """
        key, message = letter.key, letter.message
        if letter.kind is not LetterKind.PARKED:
            self._tracked(lambda claim: self._send_letter(letter, claim), lambda _: None)
            return
        assert key is not None, "a message without key cannot be parked"
        where, message_id, parked = letter.topic_partition, message.message_id, self.parking.parked
        with self.lock:
            self.parking.park(key)
            known = parked.keys.get(key)
            if known is not None and known.position(where, message_id) is not None:
                return

        def written(position: EntryId) -> None:
            now_ms = round(time.time() * 1000)
            parked.letter(position, key, where, message_id, now_ms)

        self._tracked(lambda claim: self._send_letter(letter, claim), written)

    def done(self, key: str, resting: Resting) -> None:
        """A handler got a letter of a replay done: mark that, then acknowledge the letter.

        The marker of the last one releases the key.

        Raises:
            BrokerError: As for :meth:`send`; the letter is replayed again after a restart.
        """
        letter = resting.letter
        self._done(key, letter.topic_partition, letter.message.message_id, resting.position)

    def _done(
        self, key: str, where: TopicPartition, message_id: MessageId, letter: EntryId
    ) -> None:
        marker = Marker(key, self._config.subscription, where, message_id)
        position = self._tracked(
            lambda claim: self._send(b"", key=key, properties=marker.properties() | claim),
            lambda position: self.parking.replayed(position, key, where, message_id),
            marks={letter},
        )
        self.acknowledge([letter])
        self.finished([position])

    def runs_again(self, key: str, where: TopicPartition, message_id: MessageId) -> None:
        """A message is about to run that is older than done letters of its key.

        They come again behind it where they do at all, and must then run behind it, also for a
        process that starts in between.

        Raises:
            BrokerError: As for :meth:`send`; the message must not run.
        """
        says = RunsAgain(key, self._config.subscription, where, message_id)
        position = self._tracked(
            lambda claim: self._send(b"", key=key, properties=says.properties() | claim),
            lambda position: self.parking.parked.run_again(position, key, where, message_id),
        )
        self.finished([position])

    def discard(self, keys: Sequence[str]) -> int:
        """Give up the letters of parked keys that are confirmed now; how many those were.

        All of them are marked before the first marker is sent: a marker claims the oldest letter
        that rests, and would hold up that letter's own.

        Raises:
            BrokerError: As for :meth:`send`.
        """
        sweeps: list[Sweep] = []
        gone: set[EntryId] = set()
        with self.lock:
            for key in keys:
                parked = self.parking.parked.keys.get(key)
                if parked is not None and self.parking.state(key) is State.PARKED:
                    sweeps.append(Sweep(key, self._config.subscription, parked.last))
                    gone.update(position for _, _, position in parked.letters())
        if not sweeps:
            return 0

        def send(claim: dict[str, str]) -> list[EntryId]:
            with ThreadPoolExecutor(SENT_AT_ONCE, "keyshard-discard") as pool:
                return [*pool.map(lambda sweep: self._send(
                    b"", key=sweep.key, properties=sweep.properties() | claim
                ), sweeps)]  # fmt: skip

        def swept(positions: list[EntryId]) -> None:
            for position, sweep in sorted(zip(positions, sweeps, strict=True), key=itemgetter(0)):
                self.parking.parked.swept(position, sweep.key, sweep.up_to)
            self.parking.parked.settle()

        positions = self._tracked(send, swept, marks=gone)
        self._acknowledge_all(sorted(gone))
        self.finished(positions)
        return len(gone)

    def note(self) -> None:
        """Tell which letter is the oldest now: a loss was accepted, and is not told again.

        Raises:
            BrokerError: As for :meth:`send`.
        """
        properties = {f"{PREFIX}kind": NOTED, f"{PREFIX}subscription": self._config.subscription}
        position = self._tracked(
            lambda claim: self._send(b"", key=None, properties=properties | claim),
            self.parking.parked.passed,
        )
        self.finished([position])

    def discard_rejected(self, selection: Selection) -> int:
        """Give up rejected letters, and those that went without their key; how many are stored.

        Raises:
            ReplayTimeoutError: Nothing came for ``replay_timeout_ms``.
            BrokerError: The broker cannot be reached, or refused.
        """
        if self._keeper.consumer is None:
            return 0
        last = self._keeper.consumer.last_entry()
        found: list[EntryId] = []
        now_ms = round(time.time() * 1000)
        with self.scan(FIRST, last or FIRST) as scan:
            for message in read(scan, self.topic_partition, self.replay_timeout_s):
                letter = _letter_of(message)
                if (
                    letter is not None
                    and letter.kind is not LetterKind.PARKED
                    and letter.subscription == self._config.subscription
                    and selection.selects(
                        letter.key,
                        {letter.message.topic},
                        now_ms - round(message.publish_time.timestamp() * 1000),
                    )
                ):
                    found.append(position_of(message))
                    found += parts_of(message)
        self._acknowledge_all(found)
        return len(found)

    def selected(self, selection: Selection) -> list[str]:
        """Parked keys that are meant."""
        now_ms = round(time.time() * 1000)
        with self.lock:
            if selection.key is not None:
                return [selection.key] if self.parking.state(selection.key) else []
            return self.parking.matching(
                lambda key, parked: selection.selects(key, parked.topics, now_ms - parked.since_ms)
            )

    def emptied(self, key: str) -> None:
        """No letter of a key is on its way; without one that rests it is let out."""
        with self.lock:
            self.parking.emptied(key)

    # -- replaying --------------------------------------------------------------------------------

    def unpark(self, key: str) -> bool:
        """Ask for a key to be let out; ``False`` when it is not parked, or is on its way."""
        with self.lock:
            return self.parking.unpark(key)

    def first(self, key: str) -> Resting | None:
        """Read the first resting letter of a key; ``None`` while none is confirmed.

        Raises:
            KeyShardError: As for :meth:`Replay.next`.
        """
        while True:
            with self.lock:
                parked = self.parking.parked.keys.get(key)
                positions = [] if parked is None else [parked.first_in_order()]
            found = Replay(self, key, positions).next()
            # Without one it was lost, and that is accepted: the next one is the first now.
            if found is not None or not positions:
                return found

    def is_first(self, key: str, position: EntryId) -> bool:
        """Whether a key is draining, and its first resting letter lies there."""
        with self.lock:
            parked = self.parking.parked.keys.get(key)
            draining = self.parking.state(key) is State.DRAINING
            return draining and parked is not None and parked.first_in_order() == position

    def replay(self, key: str, first: Resting) -> Replay:
        """The letters of a draining key behind its first one. Memory only.

        Nothing of the key runs and no letter of it is on its way; from now on none is written.
        """
        with self.lock:
            positions = self.parking.drained(key)
        assert positions[0] == first.position, "the first letter was read before"
        return Replay(self, key, positions[1:])

    def released(self, key: str) -> None:
        """Let a draining key out that has no letter."""
        with self.lock:
            if self.parking.state(key) is State.DRAINING and key not in self.parking.parked.keys:
                self.parking.drained(key)

    def failed_again(self, key: str) -> None:
        """A letter failed too often: its key stays parked, with this letter and the rest."""
        with self.lock:
            self.parking.failed_again(key)

    # -- the part of a checkpoint -----------------------------------------------------------------

    def checkpoint(self) -> dict[str, Any]:
        """Where to fold from, as a JSON value; :func:`open_dead_letters` goes on from there."""
        with self.lock:
            self._saving += self._finished_with
            self._finished_with = []
            self._storing = self.parking.parked.folded
            return {"topic": self.topic_partition.topic, **self.parking.parked.to_dict()}

    def saved(self) -> None:
        """What :meth:`checkpoint` gave is durable: markers before it have nothing more to prove."""
        with self.lock:
            entries, self._saving = self._saving, []
            self._stored = self._storing
        self._acknowledge_all(entries)

    @property
    def unsaved(self) -> bool:
        """Whether something is acknowledged only when another checkpoint is stored."""
        return bool(self._finished_with or self._saving)

    def close(self) -> None:
        """Flush acknowledgements and free the handles. Idempotent."""
        self._stopping.set()
        if self._returns is not None:
            self._returns.close()
        if self._producer is not None:
            self._producer.close()
        self._keeper.close()

    # -- called by replays ------------------------------------------------------------------------

    def came_by(self, position: EntryId, message: Message) -> None:
        """Keep a letter that was read for another key, if its own key is on its way out, too."""
        with self.lock:
            key = message.routing_key
            if key is None or self.parking.state(key) in (None, State.PARKED):
                return
            parked = self.parking.parked.keys.get(key)
            found = _letter_of(message)
            if parked is None or position in self._near or found is None or parts_of(message):
                return
            if parked.position(found.topic_partition, found.message.message_id) != position:
                return
            self._near[position] = found
            self._near_bytes += _bytes(found)
            while self._near_bytes > NEAR_BYTES_MAX:
                self._near_bytes -= _bytes(self._near.pop(next(iter(self._near))))

    def kept(self, positions: Iterable[EntryId]) -> list[Resting]:
        """What was kept of the next letters of a replay, without a gap."""
        found: list[Resting] = []
        with self.lock:
            for position in positions:
                letter = self._near.pop(position, None)
                if letter is None:
                    break
                self._near_bytes -= _bytes(letter)
                found.append(Resting(position, letter))
        return found

    # -- helpers ----------------------------------------------------------------------------------

    def scan(self, start: EntryId, last: EntryId) -> Scan:
        """Reads a stretch of the dead-letter topic."""
        return Scan(self._broker, self.topic_partition, start, last)

    def lost(self, key: str, missing: Sequence[EntryId]) -> None:
        """Letters of a key are not stored any more; where that is accepted, they are done.

        Raises:
            DataLossTrimmedError: Unless ``fail_on_data_loss`` is false.
        """
        error = DataLossTrimmedError(
            f"{len(missing)} letters of key {key!r} are no longer stored in {self.topic_partition},"
            f" first {missing[0].ledger}:{missing[0].entry}: retention, TTL or somebody else "
            "removed them before they were replayed. Restore the topic, or set fail_on_data_loss "
            "to false if the loss is accepted.",
            topic_partition=self.topic_partition.name,
            missing=str(EntrySet.of(missing)),
        )
        if self._config.fail_on_data_loss:
            raise error
        _log.warning("%s Left out, because fail_on_data_loss is false.", error)
        with self.lock:
            parked, gone = self.parking.parked.keys.get(key), set(missing)
            letters = [one for one in parked.letters() if one[2] in gone] if parked else []
        for where, message_id, position in letters:
            self._done(key, where, message_id, position)

    @property
    def replay_timeout_s(self) -> float:
        """Longest time to read the next letters of a replay, seconds."""
        return self._config.replay_timeout_ms / 1000

    def _tracked(
        self,
        send: Callable[[dict[str, str]], Sent],
        fold: Callable[[Sent], object],
        marks: Collection[EntryId] = (),
    ) -> Sent:
        """Send something and fold it. What failed keeps the checkpoint's position behind it.

        Args:
            send: Sends it, with the properties that claim a letter.
            fold: Takes its position, or positions.
            marks: Letters that it calls done.
        """
        what, parked = object(), self.parking.parked
        with self.lock:
            parked.marking(marks)
            if not self.lock.wait_for(lambda: not parked.claims(marks), self._timeout_s):
                raise BrokerUnavailableError(
                    f"Something sent to {self.topic_partition} was not confirmed within "
                    f"{self._timeout_s:g} s."
                )
            oldest = parked.sending(what)
        position = send({} if oldest is None else {OLDEST: position_text(oldest)})
        with self.lock:
            fold(position)
            parked.sent(what, marks)
            self.lock.notify_all()
        return position

    @property
    def _timeout_s(self) -> float:
        """As patient as acknowledging: a broker that is away a while must not end the source."""
        return self._config.acknowledge_timeout_ms / 1000

    def _send_in_parts(self, letter: Letter, claim: Mapping[str, str]) -> EntryId:
        """Write a letter that is larger than the broker takes: its parts, then the letter."""
        packed, head = letter.packed()
        own = {f"{PREFIX}kind": PART, f"{PREFIX}subscription": self._config.subscription}
        size = PART_BYTES
        while True:
            try:
                found = [
                    self._send(packed[at : at + size], key=None, properties={**own, **claim})
                    for at in range(0, len(packed), size)
                ]
                break
            except MessageTooLargeError:
                if size <= PART_BYTES_MIN:
                    raise
                size //= 4
        parts, message = EntrySet.of(found), letter.message
        position = self._send(
            b"",
            key=message.key,
            ordering_key=message.ordering_key,
            properties={**letter.own_properties(), PARTS: str(parts), HEAD: str(head), **claim},
            event_ms=letter.event_ms,
        )
        with self.lock:
            self.parking.parked.parts[position] = parts
        return position

    def whole(self, message: Message) -> Letter | None:
        """The letter that a message of the topic is; ``None`` when it is none, or parts are gone.

        Raises:
            ReplayTimeoutError: Its parts could not be read before ``replay_timeout_ms``.
        """
        letter = _letter_of(message)
        parts = EntrySet() if letter is None else parts_of(message)
        if letter is None or not parts:
            return letter
        found: dict[EntryId, bytes] = {}
        for stretch in stretches(parts):
            first, last = stretch.first, stretch.last
            assert first is not None
            assert last is not None
            with self.scan(first, last) as scan:
                for one in read(scan, self.topic_partition, self.replay_timeout_s):
                    found[position_of(one)] = one.value
        if any(one not in found for one in parts):
            return None
        return unpacked(letter, message, b"".join(found[one] for one in parts))

    def finished(self, entries: Sequence[EntryId]) -> None:
        """Markers are finished with once a checkpoint, where there is one, begins behind them.

        Until then they prove that their letters are done, and not lost.
        """
        if not self._checkpointed:
            self._acknowledge_all(entries)
            return
        with self.lock:
            self._finished_with += entries

    def _send_letter(self, letter: Letter, claim: Mapping[str, str]) -> EntryId:
        message = letter.message
        try:
            return self._send(
                message.value,
                key=message.key,
                ordering_key=message.ordering_key,
                properties={**letter.properties(), **claim},
                event_ms=letter.event_ms,
            )
        except MessageTooLargeError:
            return self._send_in_parts(letter, claim)

    def _send(
        self,
        value: bytes,
        *,
        key: str | None,
        properties: dict[str, str],
        ordering_key: str | None = None,
        event_ms: int = 0,
    ) -> EntryId:
        def attempt() -> EntryId:
            return self._open_producer().send(
                value, key=key, ordering_key=ordering_key, properties=properties, event_ms=event_ms
            )

        try:
            return retry_until(attempt, self._timeout_s, stop=self._stopping)
        except RangeConflictError as exc:
            raise self._keeper.in_use() from exc

    def _open_producer(self) -> Producer:
        with self._producer_lock:
            if self._producer is None:
                consumer = self._keeper.hold_for_the_first()
                if self._returns is None:
                    self._returns = LetterReturns(consumer, self._came_again)
                self._producer = self._broker.producer(
                    self.topic_partition, send_timeout_ms=self._config.operation_timeout_ms
                )
            return self._producer

    def acknowledge(self, entries: Sequence[EntryId]) -> None:
        """Entries of the dead-letter topic are finished with; a failure is made good later."""
        with self.lock:
            known = self.parking.parked.parts
            parts = [known.pop(one) for one in entries if one in known]
        # Where only some of them are remembered, a letter that comes again names its parts.
        entries = [*chain.from_iterable(parts), *entries]
        if not entries:
            return
        consumer = self._keeper.consumer
        assert consumer is not None, "there are entries, so the topic is held"
        try:
            consumer.acknowledge(entries)
        except BrokerError as exc:
            # They are read once more at the next start, and found to be finished with.
            _log.debug("%d dead letters stay unacknowledged: %s", len(entries), exc)

    def _acknowledge_all(self, entries: Sequence[EntryId]) -> None:
        for at in range(0, len(entries), ACKNOWLEDGE_AT_ONCE_MAX):
            self.acknowledge(entries[at : at + ACKNOWLEDGE_AT_ONCE_MAX])

    def _came_again(self, message: Message) -> None:
        """Acknowledge what was received of the topic, if it is finished with."""
        with self.lock:
            parked = self.parking.parked
            stored = self._stored if self._checkpointed else parked.folded
            if not is_finished(parked, message, self._config.subscription, stored):
                return
        position = position_of(message)
        try:
            parts = parts_of(message)
        except ValueError:
            parts = EntrySet()
        self._acknowledge_all([*(parts - parts.above(position)), position])


def _bytes(letter: Letter) -> int:
    return len(letter.message.value) + LETTER_BYTES


def _letter_of(message: Message) -> Letter | None:
    try:
        found = parse(message)
    except ValueError:
        return None
    return found if isinstance(found, Letter) else None


def open_dead_letters(
    broker: Broker,
    topic: str,
    config: SourceConfig,
    parked: Mapping[str, Any] | None = None,
    *,
    checkpointed: bool = False,
) -> DeadLetters:
    """Hold the parked letters of a source, and know which keys are parked.

    Call it when the ranges are subscribed and before the first receive: whoever held them before
    can write no letter any more that counts.

    Args:
        broker: Connection to write and read through.
        topic: Full name of the dead-letter topic; a missing one is created for the first letter.
        config: The source.
        parked: What :meth:`DeadLetters.checkpoint` gave; ``None``: the whole topic is read.
        checkpointed: Whether :meth:`DeadLetters.checkpoint` will be stored.

    Raises:
        ConfigError: The topic is partitioned.
        CheckpointError: What the checkpoint says of parked keys cannot be read.
        SubscriptionInUseError: Another source parks there as the same subscription.
        ReplayTimeoutError: The topic could not be read before ``replay_timeout_ms``.
        BrokerError: The broker cannot be reached, or refused.
    """
    timeout_s = config.operation_timeout_ms / 1000
    where = TopicPartition(topic)
    keeper = LetterKeeper(broker, where, config)
    # A checkpoint that knows of a resting letter has lost it where there is no topic.
    rests = parked is not None and Parked.from_dict(parked).claimed is not None
    if not rests and retry_until(keeper.is_missing, timeout_s):
        return DeadLetters(broker, where, config, keeper, Parked(), checkpointed=checkpointed)
    try:
        consumer = retry_until(keeper.hold, config.subscribe_timeout_ms / 1000)
    except RangeConflictError as exc:
        raise keeper.in_use() from exc

    def folded() -> tuple[Parked, list[EntryId]]:
        state = Parked() if parked is None else Parked.from_dict(parked)
        return state, fold(broker, where, state, consumer, config)

    try:
        replay_s = config.replay_timeout_ms / 1000
        state, finished = retry_until(folded, replay_s)
    except BaseException:
        keeper.close()
        raise
    stored = None if parked is None else Parked.from_dict(parked).begin
    letters = DeadLetters(
        broker, where, config, keeper, state, checkpointed=checkpointed, stored=stored
    )
    letters.finished(finished)
    if state.claimed is not None:
        letters.note()
    if state.keys:
        _log.warning(
            "%d keys of %r are parked in %s, %s first; source.unpark(key) lets a key out",
            len(state.keys), config.subscription, topic, next(iter(state.keys)),
        )  # fmt: skip
    return letters
