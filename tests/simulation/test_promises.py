"""The judge of a program with handlers excuses legitimate repetitions only."""

from __future__ import annotations

from keyshard import Message
from keyshard.core.dead_letter import DeadLetter, DeadLetterKind, DoneMarker, DoneUpToMarker
from keyshard.core.message import MessageId
from keyshard.core.position.entry import EntryId, TopicPartition
from tests.simulation.handling.promises import Name, Promises

TOPIC = "persistent://public/default/orders"
NOTHING_FORGOTTEN = f"{TOPIC} a:{{}} came again, though nothing was forgotten"
SAME_PROCESS = f"{TOPIC} a:{{}} came again to the process that had done it"


def name(seq: int) -> Name:
    return Name(TOPIC, 0, MessageId(1, seq, 0))


class Course:
    """Events of the messages of one key, by sequence number."""

    def __init__(self) -> None:
        self.discarded: list[int] = []
        self.promises = Promises(
            lambda _name, _key, seq: self.discarded.append(seq), commits_in_order=True
        )
        self.dead_letters = 0

    @property
    def broken(self) -> str:
        return self.promises.broken

    def done(self, *seqs: int) -> Course:
        for seq in seqs:
            self.promises.started(name(seq), "a", seq)
            self.promises.completed(name(seq))
        return self

    def parked(self, seq: int) -> Course:
        self.promises.started(name(seq), "a", seq)
        return self.parked_behind(seq)

    def parked_behind(self, seq: int) -> Course:
        """A message of a parked key becomes a dead letter, without an attempt."""
        original = Message.for_test(b"", key="a")._replace(
            topic=TOPIC, partition=0, message_id=name(seq).id
        )
        self.dead_letters += 1
        dead_letter = DeadLetter(original, "billing", DeadLetterKind.PARKED, 1, "cannot")
        self.promises.stored(EntryId(9, self.dead_letters), dead_letter, seq)
        return self

    def replayed(self, seq: int) -> Course:
        return self.done(seq).marked(seq)

    def marked(self, seq: int) -> Course:
        self.dead_letters += 1
        marker = DoneMarker("a", "billing", TopicPartition(TOPIC, 0), name(seq).id)
        self.promises.stored(EntryId(9, self.dead_letters), marker, -1)
        return self

    def swept(self) -> Course:
        marker = DoneUpToMarker("a", "billing", EntryId(9, self.dead_letters))
        self.dead_letters += 1
        self.promises.stored(EntryId(9, self.dead_letters), marker, -1)
        return self

    def forgotten(self) -> Course:
        self.promises.disturbed()
        return self

    def next_life(self) -> Course:
        self.promises.life_begins()
        return self


def test_no_message_comes_again_after_a_stop() -> None:
    assert not Course().done(0, 1).next_life().done(2).broken
    assert Course().done(0, 1).next_life().done(1).broken == NOTHING_FORGOTTEN.format(1)


def test_messages_with_forgotten_acknowledgements_come_again_to_the_next_process() -> None:
    assert not Course().done(0, 1).forgotten().next_life().done(0, 1).broken


def test_a_process_knows_its_acknowledgements_although_the_broker_forgot() -> None:
    assert Course().done(0, 1).forgotten().done(0).broken == SAME_PROCESS.format(0)
    again = Course().parked(0).replayed(0).forgotten().done(0)
    assert again.broken == SAME_PROCESS.format(0)


def test_only_unacknowledged_messages_of_an_ended_process_come_again() -> None:
    course = Course().done(0, 1, 2)
    course.promises.left([name(1), name(2)])
    assert not course.next_life().done(1, 2).broken
    assert course.done(0).broken == NOTHING_FORGOTTEN.format(0)


def test_a_dead_letter_of_an_earlier_run_may_come_as_a_message_if_the_broker_forgot() -> None:
    course = Course().parked(1).next_life().replayed(1).forgotten()
    assert not course.done(1).broken


def test_a_replayed_message_runs_again_behind_a_redelivered_older_one() -> None:
    """Found by the simulation, seed 917176947."""
    course = Course().done(0).parked(1).forgotten().next_life().replayed(1)
    assert not course.done(0, 1).broken


def test_a_replayed_message_does_not_run_again_without_an_older_one() -> None:
    course = Course().done(0).parked(1).forgotten().next_life().replayed(1).done(2)
    assert course.done(1).broken == NOTHING_FORGOTTEN.format(1)


def test_a_replayed_message_does_not_run_again_if_its_original_was_acknowledged() -> None:
    course = Course().forgotten().parked(1).next_life().replayed(1)
    assert course.done(0, 1).broken == NOTHING_FORGOTTEN.format(1)


def test_a_replay_is_no_discard_although_a_discard_of_its_key_was_broken_off() -> None:
    """Found by the simulation ``handlers-segments``, seed 223."""
    course = Course().parked(1).parked_behind(2).parked_behind(3)
    course.promises.discarding.add("a")
    course.forgotten().next_life().replayed(1)
    assert not course.discarded
    assert course.marked(2).discarded == [2]
    assert course.swept().discarded == [2, 3]
    assert not course.broken


def test_a_handled_message_whose_marker_was_not_stored_is_discarded() -> None:
    course = Course().parked(1).done(1).forgotten().next_life()
    course.promises.discarding.add("a")
    assert course.swept().discarded == [1]
