"""Reports of a read: the ledgers that bookies returned, and those left to the broker."""

from __future__ import annotations

from contextlib import closing

from keyshard.bookkeeper.bookies import Bookies
from keyshard.bookkeeper.reader import StorageReads
from keyshard.broker.memory import MemoryBroker, MemoryCluster
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.replicas import Placement
from keyshard.core.position.split import Span, Split
from keyshard.reading.read_report import NAMED_MAX, ReadReport, planned, was_read
from tests.support.scripted_bookie import replicas


def test_a_read_tells_how_it_got_each_ledger() -> None:
    broker = MemoryBroker(MemoryCluster())
    with closing(Bookies({})) as connections:
        placed: dict[int, Placement] = {3: replicas("a"), 4: replicas("a"), 5: "it is not closed"}
        reads = StorageReads(broker, placed, connections)
        reads.from_storage[3] += 1_200
        reads.leave(EntryId(4, 0), "it has markers")
        spans = tuple(Span(one, 0, 2_000, 1, where) for one, where in placed.items())
        split = Split(TopicPartition("orders"), spans)
        seen = {3: 1_200, 4: 10, 5: 3}
        found = was_read(split, seen, reads.from_storage, reads.left)
        assert str(found) == (
            "3: 1,200 entries from bookies; 4: 10 by the broker, because it has markers; "
            "5: 3 by the broker, because it is not closed"
        )
        reads.from_storage[4] += 7
        later = was_read(split, seen, reads.from_storage, reads.left)
        found = ReadReport.of(found.by_start() | later.by_start())
        text = "4: 7 entries from bookies, then 3 by the broker, because it has markers"
        assert text in str(found)
        assert (found.by_bookies, found.by_broker) == (1_207, 6)
        assert found.reasons == {"it has markers": 3, "it is not closed": 3}
        plan = planned([split])
        assert (plan.by_bookies, plan.by_broker) == (4_000, 2_000)
        assert plan.reasons == {"it is not closed": 2_000}


def test_a_report_counts_bookies_that_were_read_entry_by_entry() -> None:
    placed: dict[int, Placement] = {3: replicas("a", "b"), 4: replicas("b", "c"), 5: replicas("d")}
    spans = tuple(Span(one, 0, 1_000, 1, where) for one, where in placed.items())
    split = Split(TopicPartition("orders"), spans)
    seen = {3: 1_000, 4: 1_000, 5: 1_000}
    left = {5: "it has markers"}
    found = was_read(split, seen, {3: 1_000, 4: 1_000}, left, {"b", "a", "d", "e"})
    assert [one.one_by_one for one in found.spans] == [("a", "b"), ("b",), ()]
    assert found.one_by_one == ("a", "b")
    assert str(found).endswith("it has markers; bookies that refuse batch reads: 2 (a, b)")
    batched = was_read(split, seen, {3: 1_000, 4: 1_000}, left)
    assert batched.one_by_one == ()
    assert ReadReport.of(found.by_start() | batched.by_start()).one_by_one == (), "it ran again"
    many = [f"bookie-{number:02}" for number in range(NAMED_MAX + 2)]
    found = was_read(
        Split(TopicPartition("orders"), (Span(3, 0, 1_000, 1, replicas(*many)),)),
        seen, {3: 1_000}, {}, many,
    )  # fmt: skip
    assert str(found).endswith("bookie-19, and 2 more)")
