"""The dead-letter topic of a source: writes, replays and discards of dead letters.

The subscription ``<subscription>-parked`` keeps the dead letters; see
:mod:`keyshard.dead_letters.subscription`. Its only consumer holds the whole ring, so that two
sources cannot park in one topic with the same subscription. It acknowledges unneeded
messages: replayed dead letters, markers, and messages that are neither. Rejected dead letters, and
dead letters of keys that are not parked, stay until a user acknowledges them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeVar

from keyshard.broker.admin.port import Admin
from keyshard.broker.port import Broker
from keyshard.config.source import SourceConfig
from keyshard.core.dead_letter import (
    NOTED,
    OLDEST,
    PREFIX,
    DeadLetter,
    DeadLetterKind,
    DoneMarker,
    DoneUpToMarker,
    RunsAgainNote,
    StoredDeadLetter,
    parts_of,
    position_text,
)
from keyshard.core.dead_letter_filter import DeadLetterFilter, KeyPlan
from keyshard.core.message import MessageId
from keyshard.core.position.checkpoint import PartitionCheckpoint
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.dead_letters.acknowledging import AckTracker
from keyshard.dead_letters.browser import DeadLetterBrowser
from keyshard.dead_letters.parking import ParkedKeys
from keyshard.dead_letters.replay import DeadLetterReader, Replay
from keyshard.dead_letters.subscription import DeadLetterSubscription
from keyshard.dead_letters.topic_scan import dead_letter_of, position_of, read
from keyshard.dead_letters.topic_state import TopicState
from keyshard.dead_letters.writer import DeadLetterWriter
from keyshard.errors import (
    BrokerError,
    BrokerUnavailableError,
    DataLossTrimmedError,
    KeyShardError,
)
from keyshard.threads import Pool

SENT_AT_ONCE = 32
"""Markers that wait for their confirmation at the same time during a discard."""

Sent = TypeVar("Sent")

_log = logging.getLogger(__name__)


class DeadLetterStore:
    """The dead letters of one source. Any thread may call it; every wait has a deadline.

    A method that writes returns after the broker has confirmed its messages. If it raises
    ``BrokerError``, they may still be stored.

    :func:`~keyshard.dead_letters.startup.open_dead_letters` makes it.

    Args:
        broker: Connection to write and read through.
        topic_partition: The dead-letter topic.
        config: Options of the source.
        keeper: Holds the subscription that keeps the dead letters.
        parked: State of the topic.
        checkpointed: Whether :meth:`saved` will be called.
        stored: Position from which the stored checkpoint folds the topic; ``None``: there is none.
        admin: Knows which rejected dead letters are discarded; ``None``: there is no admin
            interface.
        fail: Called with an unexpected error of a thread, which ends the source.
    """

    def __init__(
        self,
        broker: Broker,
        topic_partition: TopicPartition,
        config: SourceConfig,
        keeper: DeadLetterSubscription,
        parked: TopicState,
        *,
        checkpointed: bool = False,
        stored: EntryId | None = None,
        admin: Admin | None = None,
        fail: Callable[[KeyShardError], None],
    ) -> None:
        self.topic_partition = topic_partition
        self.keys = ParkedKeys(parked)
        self._config = config
        self._keeper = keeper
        self.finished = AckTracker(
            self.keys, keeper, config.subscription,
            checkpointed=checkpointed, stored=stored, fail=fail,
        )  # fmt: skip
        self._writer = DeadLetterWriter(
            broker, topic_partition, config, keeper, self.finished.receive
        )
        self._reader = DeadLetterReader(
            broker, topic_partition, self.keys, config.replay_timeout_ms / 1000
        )
        self.browser = DeadLetterBrowser(
            self._reader, self.keys, config.subscription, self._last_entry, admin
        )

    # -- writing ----------------------------------------------------------------------------------

    def send(self, dead_letter: DeadLetter) -> None:
        """Write a dead letter and wait for its confirmation; then its message counts as completed.

        If its kind is ``PARKED``, its key is parked from now on, and nothing is written if a dead
        letter of the same original rests already.

        Raises:
            BrokerUnavailableError: No confirmation within ``acknowledge_timeout_ms``. The dead
                letter may still be stored; the message must stay unacknowledged.
            BrokerError: The broker refused it.
        """
        key, where, message_id = (
            dead_letter.key,
            dead_letter.topic_partition,
            dead_letter.message.message_id,
        )
        parks = dead_letter.kind is DeadLetterKind.PARKED
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
                parked.dead_letter(position, key, where, message_id, round(time.time() * 1000))

        self._tracked(lambda claim: self._writer.dead_letter(dead_letter, claim), written)

    def done(self, key: str, resting: StoredDeadLetter) -> None:
        """Mark a replayed dead letter as done, then acknowledge it.

        The marker of the last one releases the key.

        Raises:
            BrokerError: As for :meth:`send`; the dead letter is replayed again after a restart.
        """
        dead_letter = resting.dead_letter
        self._done(
            key, dead_letter.topic_partition, dead_letter.message.message_id, resting.position
        )

    def _done(
        self, key: str, where: TopicPartition, message_id: MessageId, dead_letter: EntryId
    ) -> None:
        marker = DoneMarker(key, self._config.subscription, where, message_id)
        position = self._tracked(
            lambda claim: self._writer.marker(key, marker.properties() | claim),
            lambda position: self.keys.parking.replayed(position, key, where, message_id),
            marks={dead_letter},
        )
        self.finished.acknowledge([dead_letter])
        self.finished.markers([position])

    def runs_again(self, key: str, where: TopicPartition, message_id: MessageId) -> None:
        """Note that a message older than done dead letters of its key is about to be handled.

        If the originals of those dead letters are redelivered, handlers must get them again after
        this message. A process that starts in between learns that from the note.

        Raises:
            BrokerError: As for :meth:`send`; the message must not run.
        """
        says = RunsAgainNote(key, self._config.subscription, where, message_id)
        position = self._tracked(
            lambda claim: self._writer.marker(key, says.properties() | claim),
            lambda position: self.keys.parking.parked.run_again(position, key, where, message_id),
        )
        self.finished.markers([position])

    def discard(self, chosen: Mapping[str, Collection[EntryId]]) -> list[KeyPlan]:
        """Discard confirmed dead letters of parked keys; return what was discarded.

        No marker of this call claims (names as resting) a dead letter that the call discards. The
        marker of such a dead letter would have to wait until that claim is confirmed.

        Args:
            chosen: Positions of the dead letters, by key. Those that do not rest any more, and
                those of keys that are being unparked, are left out.

        Raises:
            BrokerError: As for :meth:`send`.
        """
        marks: list[DoneUpToMarker | DoneMarker] = []
        gone: set[EntryId] = set()
        done: list[KeyPlan] = []
        with self.keys.lock:
            for key, parked in self.keys.parking.resting(chosen).items():
                wanted = set(chosen[key])
                found = [one for one in parked.dead_letters() if one[2] in wanted]
                if len(found) == parked.count:
                    # One marker up to a position also covers second copies of these dead letters.
                    marks.append(DoneUpToMarker(key, self._config.subscription, parked.last))
                else:
                    marks += [DoneMarker(key, self._config.subscription, *one[:2]) for one in found]
                gone.update(position for _, _, position in found)
                done.append(KeyPlan(key, len(found), len(wanted)))
        if not marks:
            return done

        def send(claim: dict[str, str]) -> list[EntryId]:
            with Pool(SENT_AT_ONCE, "keyshard-discard") as pool:
                return [*pool.map(lambda mark: self._writer.marker(
                    mark.key, mark.properties() | claim
                ), marks)]  # fmt: skip

        def marked(positions: list[EntryId]) -> None:
            parked = self.keys.parking.parked
            for position, mark in sorted(zip(positions, marks, strict=True), key=itemgetter(0)):
                if isinstance(mark, DoneUpToMarker):
                    parked.swept(position, mark.key, mark.up_to)
                else:
                    parked.replayed(position, mark.key, mark.topic_partition, mark.message_id)
            parked.apply_sweeps()

        positions = self._tracked(send, marked, marks=gone)
        self.finished.acknowledge(sorted(gone))
        self.finished.markers(positions)
        return done

    def discard_rejected(self, wanted: DeadLetterFilter, *, dry_run: bool = False) -> int:
        """Discard rejected dead letters, and those whose key was not parked; return their number.

        Args:
            wanted: Dead letters to discard.
            dry_run: Only count them.

        Raises:
            ReplayTimeoutError: Nothing came for ``replay_timeout_ms``.
            BrokerError: The broker cannot be reached, or refused.
        """
        found = self.browser.rejected(wanted)
        if not dry_run:
            self.finished.acknowledge([at for one in found for at in (one.position, *one.parts)])
        return len(found)

    def note(self) -> None:
        """Write which resting dead letter is the oldest, to report an accepted loss only once.

        Raises:
            BrokerError: As for :meth:`send`.
        """
        properties = {f"{PREFIX}kind": NOTED, f"{PREFIX}subscription": self._config.subscription}
        position = self._tracked(
            lambda claim: self._writer.marker(None, properties | claim),
            self.keys.parking.parked.passed,
        )
        self.finished.markers([position])

    # -- replaying --------------------------------------------------------------------------------

    def first(self, key: str) -> StoredDeadLetter | None:
        """Read the first resting dead letter of a key; ``None`` while none is confirmed.

        Raises:
            KeyShardError: As for :meth:`Replay.next`.
        """
        while True:
            position = self.keys.first_position(key)
            if position is None:
                return None
            found = self._replay(key, [position]).next()
            # If none is found, it was lost and the loss is accepted: the next one is the first now.
            if found is not None:
                return found

    def peek(self, key: str, timeout_s: float) -> tuple[DeadLetter, bool] | None:
        """Read the first resting dead letter of a key, without its parts; it stays stored.

        Returns:
            The dead letter, and whether it has parts, which hold its value.

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
                    found = dead_letter_of(message)
                    return None if found is None else (found, bool(parts_of(message)))
        return None

    def replay(self, key: str, first: StoredDeadLetter) -> Replay:
        """Return the dead letters of a draining key after its first one. Memory only.

        The caller ensures that no message of the key runs and no dead letter of it is in flight.
        From now on no dead letter of the key is written.
        """
        positions = self.keys.drained(key)
        assert positions[0] == first.position, "the first dead letter was read before"
        return self._replay(key, positions[1:])

    # -- the part of a checkpoint -----------------------------------------------------------------

    def checkpoint(
        self, partitions: Mapping[TopicPartition, PartitionCheckpoint]
    ) -> dict[str, Any]:
        """Return the position to fold from, as JSON for :func:`open_dead_letters`.

        Args:
            partitions: State of each topic partition in the checkpoint, without deleted ones.
        """
        with self.keys.lock:
            self.finished.saving()
            parked = self.keys.parking.parked.to_dict(partitions)
        return {"topic": self.topic_partition.topic, **parked}

    def saved(self) -> None:
        """Note that the newest result of :meth:`checkpoint` is durable."""
        self.finished.saved()

    @property
    def unsaved(self) -> bool:
        """Whether entries wait for the next checkpoint before they are acknowledged."""
        return self.finished.unsaved

    def close(self) -> None:
        """Flush acknowledgements and close the handles. Idempotent."""
        self._writer.stop()
        self.finished.close()
        for part in (self._writer, self._keeper):
            try:
                part.close()
            except BrokerError as exc:  # noqa: PERF203 - an outage now is no error of the run
                _log.warning("the dead letters did not end cleanly: %s", exc.summary)

    # -- helpers ----------------------------------------------------------------------------------

    def _last_entry(self) -> EntryId | None:
        consumer = self._keeper.consumer
        return None if consumer is None else consumer.last_entry()

    def _replay(self, key: str, positions: Sequence[EntryId]) -> Replay:
        return Replay(self._reader, positions, lambda missing: self._lost(key, missing))

    def _lost(self, key: str, missing: Sequence[EntryId]) -> None:
        """Mark dead letters of a key as done that are no longer stored, if that loss is accepted.

        Raises:
            DataLossTrimmedError: ``fail_on_data_loss`` is true.
        """
        error = DataLossTrimmedError(
            f"{len(missing)} dead letters of key {key!r} are no longer stored in "
            f"{self.topic_partition}, first {position_text(missing[0])}. Retention, TTL or "
            "another client removed them before their replay.",
            "Restore the topic. To accept the loss, set fail_on_data_loss to false.",
            topic_partition=self.topic_partition.name,
            missing=str(EntrySet.of(missing)),
        )
        if self._config.fail_on_data_loss:
            raise error
        _log.warning("%s They are left out, because fail_on_data_loss is false.", error.summary)
        with self.keys.lock:
            parked, gone = self.keys.parking.parked.keys.get(key), set(missing)
            dead_letters = (
                [one for one in parked.dead_letters() if one[2] in gone] if parked else []
            )
        for where, message_id, position in dead_letters:
            self._done(key, where, message_id, position)

    def _tracked(
        self,
        send: Callable[[dict[str, str]], Sent],
        fold: Callable[[Sent], object],
        marks: Collection[EntryId] = (),
    ) -> Sent:
        """Send messages, and fold them into the state once they are confirmed.

        If sending fails, they may still be stored. So all later checkpoints begin before them, and
        the next start reads them from the topic.

        Args:
            send: Sends them with the given properties, which name the oldest resting dead letter.
            fold: Folds them; gets the result of ``send``, their position or positions.
            marks: Dead letters that they mark as done.
        """
        what, parked = object(), self.keys.parking.parked
        with self.keys.lock:
            parked.marking(marks)
            if not self.keys.lock.wait_for(
                lambda: not parked.claims(marks), self._writer.timeout_s
            ):
                raise BrokerUnavailableError(
                    f"A message to {self.topic_partition} was not confirmed within "
                    f"{self._writer.timeout_s:g} s.",
                    "Check the load of the broker.",
                )
            oldest = parked.sending(what)
        position = send({} if oldest is None else {OLDEST: position_text(oldest)})
        with self.keys.lock:
            fold(position)
            parked.sent(what, marks)
            self.keys.lock.notify_all()
        return position
