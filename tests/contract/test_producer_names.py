"""Contract: what a broker knows of producer names, and what it forgets."""

from __future__ import annotations

import pytest

from keyshard.broker.port import EntryProducer
from keyshard.broker.unconfirmed import MaybeStoredError
from keyshard.core.position.entry import TopicPartition
from keyshard.core.publishing import NOTHING
from keyshard.errors import ProducerBusyError
from tests.contract.contract_harness import BreakableHarness, Harness
from tests.contract.entries import NAME, deduplicated, named, numbered, stored, values
from tests.helpers import wait_until


@pytest.fixture(autouse=True)
def _publishing(request: pytest.FixtureRequest) -> None:
    name = "breakable" if "breakable" in request.fixturenames else "harness"
    if not request.getfixturevalue(name).publishes_entries:
        pytest.skip("pulsar-client publishes no entries")


def write(harness: Harness, where: TopicPartition, name: str, start: int, stop: int) -> int:
    """Publish an entry under a name; return the last id that the broker knew before."""
    producer = named(harness.broker(), where, name)
    known = producer.last_sequence_id
    producer.publish(numbered(start, stop), start)
    producer.flush()
    producer.close()
    return known


def test_a_forgotten_name_stores_its_ids_again_and_the_others_do_not(harness: Harness) -> None:
    where = deduplicated(harness)
    assert write(harness, where, NAME, 0, 10) == NOTHING
    harness.forget_name(where, NAME)
    assert write(harness, where, NAME, 0, 5) == NOTHING
    assert write(harness, where, NAME, 3, 8) == 4
    assert stored(harness.broker(), where).values == values([*range(10), *range(8)])


def test_more_names_than_the_broker_keeps_are_known_whole_or_not_at_all(
    breakable: BreakableHarness,
) -> None:
    where = deduplicated(breakable)
    names = [f"n-{number}" for number in range(breakable.names_max + 3)]
    for start in (0, 3):
        for name in names:
            assert write(breakable, where, name, start, start + 3) == start - 1

    def known() -> list[int]:
        found = []
        for name in names:
            producer = named(breakable.broker(), where, name)
            found.append(producer.last_sequence_id)
            producer.close()
        return found

    assert known() == [5] * len(names), "the broker forgets only when it loads the topic"

    def forgotten() -> bool:
        breakable.unload(where)
        return NOTHING in known()

    wait_until(forgotten)
    ids = known()
    assert set(ids) == {5, NOTHING}
    name = names[ids.index(NOTHING)]
    assert write(breakable, where, name, 3, 6) == NOTHING
    assert len(stored(breakable.broker(), where).values) == 6 * len(names) + 3


def test_the_name_of_a_holder_that_does_not_answer_is_taken_over(
    breakable: BreakableHarness,
) -> None:
    where = deduplicated(breakable)
    holder = breakable.other_producer(where, NAME)
    assert not holder.publish(0, 1)
    assert not holder.publish(1, 3)
    holder.freeze()
    broker = breakable.broker()
    taken: list[EntryProducer] = []

    def takes() -> bool:
        try:
            taken.append(named(broker, where))
        except ProducerBusyError:
            return False
        return True

    wait_until(takes)
    assert taken[0].last_sequence_id == 2
    taken[0].publish(numbered(3, 6), 3)
    taken[0].flush()
    taken[0].close()
    holder.thaw()
    if breakable.release.knows_every_id:
        assert not holder.publish(3, 9)
        assert stored(broker, where).values == values(range(9))
    else:
        assert holder.publish(3, 9) == MaybeStoredError.code
        assert stored(broker, where).values == values(range(6))
