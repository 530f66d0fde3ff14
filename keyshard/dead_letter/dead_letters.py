"""The dead-letter topic of a source: what is written to it, and read back from it.

A subscription of its own, ``<subscription>-parked``, keeps the letters; see
:mod:`keyshard.dead_letter.keeper`. Its only consumer holds the whole ring, so that two sources
cannot park in one topic as the same subscription, and acknowledges what is finished with: letters
that were replayed, markers, and whatever is neither. Rejected letters and dead letters of keys that
went on stay until somebody acknowledges them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeVar

from keyshard.broker.port import Broker
from keyshard.config.source import SourceConfig
from keyshard.core.dead_letter.letters import (
    NOTED,
    OLDEST,
    PREFIX,
    Letter,
    LetterKind,
    Marker,
    Resting,
    RunsAgain,
    Sweep,
    parts_of,
    position_text,
)
from keyshard.core.dead_letter.parked import Parked
from keyshard.core.dead_letter.parking import State
from keyshard.core.dead_letter.selection import Selection
from keyshard.core.message import MessageId
from keyshard.core.position.checkpoint import PartitionCheckpoint
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.dead_letter.finished import FinishedWith
from keyshard.dead_letter.keeper import LetterKeeper
from keyshard.dead_letter.letter_reader import LetterReader
from keyshard.dead_letter.parked_keys import ParkedKeys
from keyshard.dead_letter.reading import FIRST, letter_of, position_of, read
from keyshard.dead_letter.replay import Replay
from keyshard.dead_letter.writer import DeadLetterWriter
from keyshard.errors import BrokerUnavailableError, DataLossTrimmedError, KeyShardError
from keyshard.threads import Pool

SENT_AT_ONCE = 32
"""Markers that wait for their confirmation at the same time while letters are given up."""

Sent = TypeVar("Sent")

_log = logging.getLogger(__name__)


class DeadLetters:
    """A :class:`~keyshard.dead_letter.store.DeadLetterStore`, made by
    :func:`~keyshard.dead_letter.opening.open_dead_letters`.

    Args:
        broker: Connection to write and read through.
        topic_partition: The dead-letter topic.
        config: The source.
        keeper: Holds the subscription that keeps the letters.
        parked: What the topic says.
        checkpointed: Whether :meth:`saved` will be called.
        stored: Everything before it is folded in the checkpoint that is stored.
        fail: Told of an unexpected error of a thread, which ends the source.
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
        fail: Callable[[KeyShardError], None],
    ) -> None:
        self.topic_partition = topic_partition
        self.keys = ParkedKeys(parked)
        self._config = config
        self._keeper = keeper
        self.finished = FinishedWith(
            self.keys, keeper, config.subscription,
            checkpointed=checkpointed, stored=stored, fail=fail,
        )  # fmt: skip
        self._writer = DeadLetterWriter(
            broker, topic_partition, config, keeper, self.finished.receive
        )
        self._reader = LetterReader(
            broker, topic_partition, self.keys, config.replay_timeout_ms / 1000
        )

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
        key, where, message_id = letter.key, letter.topic_partition, letter.message.message_id
        parks = letter.kind is LetterKind.PARKED
        if parks:
            assert key is not None, "a message without key cannot be parked"
            with self.keys.lock:
                self.keys.parking.park(key)
                if self.keys.parking.parked.rests(key, where, message_id):
                    return

        def written(found: tuple[EntryId, EntrySet]) -> None:
            position, parts = found
            parked = self.keys.parking.parked
            if parts:
                parked.parts[position] = parts
            if parks and key is not None:
                parked.letter(position, key, where, message_id, round(time.time() * 1000))

        self._tracked(lambda claim: self._writer.letter(letter, claim), written)

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
            lambda claim: self._writer.marker(key, marker.properties() | claim),
            lambda position: self.keys.parking.replayed(position, key, where, message_id),
            marks={letter},
        )
        self.finished.acknowledge([letter])
        self.finished.markers([position])

    def runs_again(self, key: str, where: TopicPartition, message_id: MessageId) -> None:
        """A message is about to run that is older than done letters of its key.

        They come again behind it where they do at all, and must then run behind it, also for a
        process that starts in between.

        Raises:
            BrokerError: As for :meth:`send`; the message must not run.
        """
        says = RunsAgain(key, self._config.subscription, where, message_id)
        position = self._tracked(
            lambda claim: self._writer.marker(key, says.properties() | claim),
            lambda position: self.keys.parking.parked.run_again(position, key, where, message_id),
        )
        self.finished.markers([position])

    def discard(self, keys: Sequence[str]) -> int:
        """Give up the letters of parked keys that are confirmed now; how many those were.

        All of them are marked before the first marker is sent: a marker claims the oldest letter
        that rests, and would hold up that letter's own.

        Raises:
            BrokerError: As for :meth:`send`.
        """
        sweeps: list[Sweep] = []
        gone: set[EntryId] = set()
        with self.keys.lock:
            for key in keys:
                parked = self.keys.parking.parked.keys.get(key)
                if parked is not None and self.keys.parking.state(key) is State.PARKED:
                    sweeps.append(Sweep(key, self._config.subscription, parked.last))
                    gone.update(position for _, _, position in parked.letters())
        if not sweeps:
            return 0

        def send(claim: dict[str, str]) -> list[EntryId]:
            with Pool(SENT_AT_ONCE, "keyshard-discard") as pool:
                return [*pool.map(lambda sweep: self._writer.marker(
                    sweep.key, sweep.properties() | claim
                ), sweeps)]  # fmt: skip

        def swept(positions: list[EntryId]) -> None:
            for position, sweep in sorted(zip(positions, sweeps, strict=True), key=itemgetter(0)):
                self.keys.parking.parked.swept(position, sweep.key, sweep.up_to)
            self.keys.parking.parked.settle()

        positions = self._tracked(send, swept, marks=gone)
        self.finished.acknowledge(sorted(gone))
        self.finished.markers(positions)
        return len(gone)

    def note(self) -> None:
        """Tell which letter is the oldest now: a loss was accepted, and is not told again.

        Raises:
            BrokerError: As for :meth:`send`.
        """
        properties = {f"{PREFIX}kind": NOTED, f"{PREFIX}subscription": self._config.subscription}
        position = self._tracked(
            lambda claim: self._writer.marker(None, properties | claim),
            self.keys.parking.parked.passed,
        )
        self.finished.markers([position])

    def discard_rejected(self, selection: Selection, *, count_only: bool = False) -> int:
        """Give up rejected letters, and those that went without their key; how many are stored.

        Args:
            selection: Which.
            count_only: Only count them.

        Raises:
            ReplayTimeoutError: Nothing came for ``replay_timeout_ms``.
            BrokerError: The broker cannot be reached, or refused.
        """
        if self._keeper.consumer is None:
            return 0
        last = self._keeper.consumer.last_entry()
        letters: set[EntryId] = set()
        found: list[EntryId] = []
        now_ms = round(time.time() * 1000)
        with self._reader.scan(FIRST, last or FIRST) as scan:
            for message in read(scan, self.topic_partition, self._reader.timeout_s):
                letter = letter_of(message)
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
                    letters.add(position_of(message))
                    found += [position_of(message), *parts_of(message)]
        if not count_only:
            self.finished.acknowledge(found)
        return len(letters)

    # -- replaying --------------------------------------------------------------------------------

    def first(self, key: str) -> Resting | None:
        """Read the first resting letter of a key; ``None`` while none is confirmed.

        Raises:
            KeyShardError: As for :meth:`Replay.next`.
        """
        while True:
            position = self.keys.first_position(key)
            if position is None:
                return None
            found = self._replay(key, [position]).next()
            # Without one it was lost, and that is accepted: the next one is the first now.
            if found is not None:
                return found

    def peek(self, key: str, timeout_s: float) -> Letter | None:
        """Read the first resting letter of a key, which rests on; without its parts.

        Raises:
            ReplayTimeoutError: Nothing came for ``timeout_s``.
            BrokerError: The broker cannot be reached, or refused.
        """
        position = self.keys.first_position(key)
        if position is None:
            return None
        with self._reader.scan(position, position) as scan:
            for message in read(scan, self.topic_partition, timeout_s):
                if position_of(message) == position:
                    return letter_of(message)
        return None

    def replay(self, key: str, first: Resting) -> Replay:
        """The letters of a draining key behind its first one. Memory only.

        Nothing of the key runs and no letter of it is on its way; from now on none is written.
        """
        positions = self.keys.drained(key)
        assert positions[0] == first.position, "the first letter was read before"
        return self._replay(key, positions[1:])

    # -- the part of a checkpoint -----------------------------------------------------------------

    def checkpoint(
        self, partitions: Mapping[TopicPartition, PartitionCheckpoint]
    ) -> dict[str, Any]:
        """Where to fold from, as a JSON value; :func:`open_dead_letters` goes on from there.

        Args:
            partitions: What else the checkpoint has of each topic partition that is not gone.
        """
        with self.keys.lock:
            self.finished.saving()
            parked = self.keys.parking.parked.to_dict(partitions)
        return {"topic": self.topic_partition.topic, **parked}

    def saved(self) -> None:
        """What :meth:`checkpoint` gave is durable."""
        self.finished.saved()

    @property
    def unsaved(self) -> bool:
        """Whether something is acknowledged only when another checkpoint is stored."""
        return self.finished.unsaved

    def close(self) -> None:
        """Flush acknowledgements and free the handles. Idempotent."""
        self._writer.stop()
        self.finished.close()
        self._writer.close()
        self._keeper.close()

    # -- helpers ----------------------------------------------------------------------------------

    def _replay(self, key: str, positions: Sequence[EntryId]) -> Replay:
        return Replay(self._reader, positions, lambda missing: self._lost(key, missing))

    def _lost(self, key: str, missing: Sequence[EntryId]) -> None:
        """Letters of a key are not stored any more; where that is accepted, they are done.

        Raises:
            DataLossTrimmedError: Unless ``fail_on_data_loss`` is false.
        """
        error = DataLossTrimmedError(
            f"{len(missing)} dead letters of key {key!r} are no longer stored in "
            f"{self.topic_partition}, first {position_text(missing[0])}: retention, TTL "
            "or somebody else removed them before they were replayed. Restore the topic, or set "
            "fail_on_data_loss to false if the loss is accepted.",
            topic_partition=self.topic_partition.name,
            missing=str(EntrySet.of(missing)),
        )
        if self._config.fail_on_data_loss:
            raise error
        _log.warning("%s Left out, because fail_on_data_loss is false.", error)
        with self.keys.lock:
            parked, gone = self.keys.parking.parked.keys.get(key), set(missing)
            letters = [one for one in parked.letters() if one[2] in gone] if parked else []
        for where, message_id, position in letters:
            self._done(key, where, message_id, position)

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
        what, parked = object(), self.keys.parking.parked
        with self.keys.lock:
            parked.marking(marks)
            if not self.keys.lock.wait_for(
                lambda: not parked.claims(marks), self._writer.timeout_s
            ):
                raise BrokerUnavailableError(
                    f"Something sent to {self.topic_partition} was not confirmed within "
                    f"{self._writer.timeout_s:g} s."
                )
            oldest = parked.sending(what)
        position = send({} if oldest is None else {OLDEST: position_text(oldest)})
        with self.keys.lock:
            fold(position)
            parked.sent(what, marks)
            self.keys.lock.notify_all()
        return position
