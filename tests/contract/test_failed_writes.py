"""Contract: ids that a broker has accepted, while its storage holds or loses their entries."""

from __future__ import annotations

from contextlib import closing, suppress

import pytest

from keyshard.broker.port import EntryProducer
from keyshard.broker.unconfirmed import BeginAgainError, MaybeStoredError
from keyshard.core.position.entry import TopicPartition
from keyshard.errors import ProducerBusyError
from tests.contract.contract_harness import COME_BACK_S, FailingHarness
from tests.contract.entries import NAME, deduplicated, named, numbered, stored, values
from tests.helpers import wait_until


def began(failing: FailingHarness, where: TopicPartition) -> EntryProducer:
    """A named producer with one stored entry."""
    producer = named(failing.broker(), where)
    producer.publish(numbered(0, 3), 0)
    producer.flush()
    return producer


def follower(failing: FailingHarness, where: TopicPartition) -> EntryProducer:
    """The next producer of a name that died with an entry accepted, and not stored."""
    first = failing.other_producer(where, NAME)
    first.send(3, 6)
    broker, found = failing.broker(), list[EntryProducer]()

    def is_accepted() -> bool:
        with suppress(ProducerBusyError):
            found.append(named(broker, where))
            if found[-1].last_sequence_id == 5:
                return True
            found[-1].close()
        return False

    first.kill()
    wait_until(is_accepted)
    return found[-1]


def store_again(failing: FailingHarness, where: TopicPartition) -> None:
    """Store the entry that was lost; before 5.0, a producer ends while the broker recovers."""
    broker = failing.broker()

    def is_stored() -> bool:
        with suppress(MaybeStoredError), closing(named(broker, where)) as producer:
            producer.publish(numbered(3, 6), 3)
            producer.flush()
            return True
        return False

    wait_until(is_stored, COME_BACK_S)


def test_an_accepted_entry_is_confirmed_when_it_is_stored(failing: FailingHarness) -> None:
    where = deduplicated(failing)
    producer = began(failing, where)
    with failing.held_writes(where):
        sent = producer.publish(numbered(3, 6), 3)
        assert not sent.done()
    producer.flush()
    found = stored(failing.broker(), where)
    assert sent.result(0) == found.ids[-1]
    assert found.values == values(range(6))


def test_an_accepted_entry_of_a_dead_producer_counts_when_it_is_stored(
    failing: FailingHarness,
) -> None:
    where = deduplicated(failing)
    began(failing, where).close()
    with failing.held_writes(where):
        second = follower(failing, where)
        again = second.publish(numbered(3, 6), 3)
        assert not again.done()
    new = second.publish(numbered(6, 9), 6)
    second.flush()
    found = stored(failing.broker(), where)
    assert again.result(0) is None
    assert new.result(0) == found.ids[-1]
    assert found.values == values(range(9))


def test_an_entry_whose_write_fails_is_stored_once(failing: FailingHarness) -> None:
    where = deduplicated(failing)
    producer = began(failing, where)
    with failing.held_writes(where) as fail:
        sent = producer.publish(numbered(3, 6), 3)
        fail()
    if failing.release.knows_every_id:
        producer.flush()
        found = stored(failing.broker(), where)
        assert sent.result(0) == found.ids[-1]
    else:
        with pytest.raises(MaybeStoredError):
            producer.flush()
        producer.close()
        store_again(failing, where)
        found = stored(failing.broker(), where)
    assert found.values == values(range(6))


def test_an_entry_of_a_dead_producer_whose_write_fails_ends_the_next_one(
    failing: FailingHarness,
) -> None:
    where = deduplicated(failing)
    began(failing, where).close()
    with failing.held_writes(where) as fail:
        second = follower(failing, where)
        again = second.publish(numbered(3, 6), 3)
        fail()
    with pytest.raises(BeginAgainError):
        second.flush()
    assert isinstance(again.exception(0), BeginAgainError)
    second.close()
    store_again(failing, where)
    assert stored(failing.broker(), where).values == values(range(6))
