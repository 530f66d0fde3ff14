"""Names of topic partitions and entries, and the facts of a block."""

from __future__ import annotations

from base64 import b64encode

import pytest
from msgspec.structs import replace

from keyshard.core.position.entry import EntryId, TopicPartition, full_topic_name, memory_of
from keyshard.core.ring.key_slot import key_slot
from keyshard.errors import ConfigError, NonPersistentTopicError
from tests.helpers import block


@pytest.mark.parametrize(
    ("short", "full"),
    [
        ("orders", "persistent://public/default/orders"),
        ("acme/shop/orders", "persistent://acme/shop/orders"),
        ("persistent://acme/shop/orders", "persistent://acme/shop/orders"),
        ("orders-partition-3", "persistent://public/default/orders-partition-3"),
    ],
)
def test_a_topic_name_is_completed(short: str, full: str) -> None:
    assert full_topic_name(short) == full


@pytest.mark.parametrize(
    "name",
    ["", "a/b", "a/b/c/d", "persistent://orders", "persistent://a/b/", "kafka://a/b/c", "a b",
     "persistent://", "//", "a/ /c", "a/b/c\n"],
)  # fmt: skip
def test_an_invalid_topic_name_is_refused_and_shown(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        full_topic_name(name)
    assert caught.value.message.startswith(f"{name!r} is not a topic name. Write")


def test_a_non_persistent_topic_is_refused_by_name() -> None:
    with pytest.raises(NonPersistentTopicError, match="non-persistent") as caught:
        full_topic_name("non-persistent://public/default/t")
    assert caught.value.facts == {"topic": "non-persistent://public/default/t"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("topic://public/default/t", "a scalable topic"),
        ("TOPIC://public/default/t", "a scalable topic"),
        ("topic://t", "a scalable topic"),
        ("Segment://public/default/t/0000-ffff-0", "a segment of a scalable topic"),
    ],
)
def test_a_scalable_topic_is_refused_by_name_where_none_is_taken(name: str, kind: str) -> None:
    with pytest.raises(ConfigError) as caught:
        full_topic_name(name)
    assert caught.value.problem == (
        f"{name!r} is {kind}, which keyshard consumes and reads, but does not publish to."
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("persistent://a/b/c", TopicPartition("persistent://a/b/c", -1)),
        ("persistent://a/b/c-partition-0", TopicPartition("persistent://a/b/c", 0)),
        ("persistent://a/b/c-partition-12", TopicPartition("persistent://a/b/c", 12)),
        ("persistent://a/b/c-partition-", TopicPartition("persistent://a/b/c-partition-", -1)),
        ("persistent://a/b/c-partition-007", TopicPartition("persistent://a/b/c-partition-007")),
        ("persistent://a/b/c-partition-٣", TopicPartition("persistent://a/b/c-partition-٣")),
        (
            "persistent://a/b/c-partition-9999999999",
            TopicPartition("persistent://a/b/c-partition-9999999999"),
        ),
        (
            "persistent://a/b/c-partition-1-partition-2",
            TopicPartition("persistent://a/b/c-partition-1", 2),
        ),
    ],
)
def test_a_topic_partition_is_read_from_the_brokers_name_and_written_back(
    name: str, expected: TopicPartition
) -> None:
    assert TopicPartition.parse(name) == expected
    assert expected.name == str(expected) == name


def test_topic_partitions_sort_by_number() -> None:
    unsorted = [TopicPartition("t", 10), TopicPartition("t", 2), TopicPartition("s", 11)]
    assert [tp.partition for tp in sorted(unsorted)] == [11, 2, 10]


def test_entry_ids_sort_in_publish_order() -> None:
    unsorted = [EntryId(10, 0), EntryId(9, 99), EntryId(9, 100)]
    assert sorted(unsorted) == [EntryId(9, 99), EntryId(9, 100), EntryId(10, 0)]


def test_a_block_counts_its_messages_and_knows_whether_it_is_whole() -> None:
    assert (block(1, 0).rows, block(1, 0).whole) == (1, True)
    part = block(1, 0, "a", "b", of=3)
    assert (part.rows, part.whole) == (2, False)


def test_the_first_message_routes_an_entry() -> None:
    assert block(1, 0, "a", "b").slot == key_slot("a")
    assert block(1, 0, "a", ordering_key="o").slot == key_slot("o")
    assert block(1, 0, None).slot is None


def test_slots_of_mixed_keys_are_listed_one_by_one() -> None:
    assert block(1, 0, "a", None, "b").slots == [key_slot("a"), None, key_slot("b")]


def test_a_reader_knows_every_slot_that_may_have_routed_an_entry() -> None:
    text = b64encode(b"customer").decode()
    assert block(1, 0, "plain").possible_slots == (key_slot("plain"),)
    assert block(1, 0, text).possible_slots == (key_slot(text), key_slot(b"customer"))
    assert block(1, 0, text, ordering_key="o").possible_slots == (key_slot("o"),)
    assert block(1, 0, None).possible_slots == ()


def test_the_memory_of_several_blocks_is_the_sum_of_the_memory_of_each() -> None:
    mixed = block(1, 1, "a", "b", "c", properties={"name": "value"})
    later = replace(block(1, 2, "a", "b", of=4), start=3).joined(block(1, 2, "a", of=4, first=2))
    plain = [block(1, 3, "a", "a"), replace(block(1, 4, ordering_key="k"), start=2)]
    assert mixed.mixed_slots is not None
    for blocks in ([], plain, [mixed, *plain], [later, *plain], [mixed, later]):
        assert memory_of(blocks) == sum(one.memory_bytes for one in blocks)
