"""Closed ledgers: entries whose visibility only the broker knows, and entries that look alike."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyshard.bookkeeper import reader as reader_module
from keyshard.bookkeeper.bookies import Bookies
from keyshard.bookkeeper.reader import StorageReads, _belongs_to_broker, _plain
from keyshard.broker.port import DEFAULT_READ_OPTIONS, Reader, ReadOptions
from keyshard.broker.wire.entries import RawEntry
from keyshard.broker.wire.frames import api
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.position.replicas import LedgerReplicas
from keyshard.core.protobuf import Value, message, varint
from tests.stored_entries import BASE, WHERE, plain, raw, single, stored

# Of ``MessageMetadata`` in PulsarApi.proto.
FIELDS = {"marker_type": 20, "txnid_least_bits": 22, "txnid_most_bits": 23}
TAGS = [varint(number << 3) for number in FIELDS.values()]
LEDGER = 7
OF_BROKER = message({1: 1_700_000_000_000, 2: 7})
WHY = "it has entries of transactions or markers"
VALUES = st.sampled_from([0, 1, 10, 127, 128, 2**63, 2**64 - 1])


def tagged(one: int, value: int = 0) -> bytes:
    return stored(message(BASE | {one: value}), b"value")


@pytest.mark.parametrize("broker", [b"", OF_BROKER], ids=["", "broker metadata"])
@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("field", FIELDS)
def test_entries_of_transactions_and_markers_go_to_the_broker(
    field: str, checked: bool, broker: bytes
) -> None:
    number = FIELDS[field]
    ordinary = [raw(single(plain(), checked=checked, broker=broker))] * 2
    for value in (0, 1, 21, 2**64 - 1):
        for fields in (
            BASE | {number: value},
            {number: value} | BASE,
            BASE | {number: value, 24: 9},
        ):
            special = raw(stored(message(fields), b"value", checked=checked, broker=broker))
            found, why = _plain([*ordinary, special, *ordinary])
            assert (len(found), why) == (2, WHY)
            assert _plain([special, *ordinary]) == ([], WHY)


@pytest.mark.parametrize("broker", [b"", OF_BROKER], ids=["", "broker metadata"])
@pytest.mark.parametrize("checked", [True, False])
def test_a_longer_form_of_a_tag_goes_to_the_broker(checked: bool, broker: bytes) -> None:
    """Protobuf reads ``b0 81 00`` and ``b0 81 80 00`` as ``b0 01``."""
    known = api.MessageMetadata.FromString(message(BASE) + b"\x88\x81\x80\x00\x01")
    assert known.partition_key_b64_encoded
    for tag in TAGS:
        for longer in (b"\x81\x00", b"\x81\x80\x00"):
            metadata = message(BASE) + tag[:1] + longer + b"\x05"
            special = raw(stored(metadata, b"value", checked=checked, broker=broker))
            assert _plain([special]) == ([], WHY)


LIKE_TAGS = st.lists(st.sampled_from([*TAGS, b"\xa0\x81\x00", b"\x00", b"x"]), min_size=1).map(
    b"".join
)
NAMED = st.sampled_from([1, 5, 6, 7, 16, 18])
"""Fields of text or bytes: producer, replicated from, key, replicate to, schema version,
ordering key."""


@given(
    like=LIKE_TAGS, number=NAMED, value=VALUES, checked=st.booleans(),
    broker=st.sampled_from([b"", OF_BROKER]),
)  # fmt: skip
def test_bytes_that_only_look_like_these_fields_are_read_from_bookies(
    like: bytes, number: int, value: int, checked: bool, broker: bytes
) -> None:
    """They are in a key, a property, the payload, or a number of another field."""
    pair = message({1: b"name" + like, 2: like})
    metadatas: list[dict[int, Value]] = [
        BASE | {number: like},
        BASE | {4: pair},
        BASE | {2: int.from_bytes(TAGS[0], "little"), 24: value},
        BASE,
    ]
    entries = [raw(stored(message(one), like, checked=checked, broker=broker)) for one in metadatas]
    found, why = _plain(entries)
    assert why == ""
    assert [one.data for one in found] == [one.data for one in entries]
    behind = 6 + len(broker) if broker else 0
    assert [one.position - behind for one in found] == [one.position for one in entries]


@given(fields=st.dictionaries(st.integers(1, 40), VALUES | st.binary(max_size=6), max_size=6))
def test_the_numbers_of_the_fields_decide(fields: dict[int, Value]) -> None:
    assert _belongs_to_broker(message(fields)) == bool(fields.keys() & set(FIELDS.values()))


@pytest.mark.parametrize("metadata", [b"\x0b", b"\x0a", b"\xff" * 11, b"\x08"])
def test_metadata_that_is_no_protobuf_belongs_to_the_broker(metadata: bytes) -> None:
    assert _belongs_to_broker(metadata)


class Stored:
    """A reader of a ledger whose entries are in memory; it returns two at a time."""

    entries: Sequence[bytes] = ()

    def __init__(self, ledger: LedgerReplicas, first: int, last: int, *_: Any) -> None:
        self.ledger, self.next, self.last = ledger.ledger, first, last

    @property
    def done(self) -> bool:
        return self.next > self.last

    def read(self) -> list[RawEntry]:
        start, self.next = self.next, min(self.next + 2, self.last + 1)
        return [
            RawEntry(EntryId(self.ledger, at), redelivered=False, ack_set=(),
                     data=self.entries[at], position=0)
            for at in range(start, self.next)
        ]  # fmt: skip


class Silent:
    """A broker that records the start of each reader. The readers are at their end."""

    def __init__(self) -> None:
        self.asked: list[EntryId] = []

    def reader(
        self,
        topic_partition: TopicPartition,  # noqa: ARG002 - of the port
        start: EntryId,
        how: ReadOptions = DEFAULT_READ_OPTIONS,  # noqa: ARG002 - of the port
    ) -> Reader:
        self.asked.append(start)
        return self

    def read(self, timeout_ms: int) -> list[EntryBlock]:  # noqa: ARG002 - of the port
        return []

    def at_end(self) -> bool:
        return True

    def stayed_connected(self) -> bool:
        return True

    def close(self) -> None:
        pass


@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("field", FIELDS)
def test_the_broker_is_asked_from_the_first_such_entry_on(
    monkeypatch: pytest.MonkeyPatch, field: str, at: int
) -> None:
    ordinary = single(plain(key=(TAGS[0] * 3).decode("latin-1")))
    entries = [tagged(FIELDS[field]) if one in (at, 4) else ordinary for one in range(6)]
    monkeypatch.setattr(Stored, "entries", entries)
    monkeypatch.setattr(reader_module, "LedgerReader", Stored)
    broker = Silent()
    ledger = LedgerReplicas(LEDGER, 5, 1, "CRC32C", ((0, ("a",)),))
    with closing(Bookies({})) as bookies:
        reads = StorageReads(broker, {LEDGER: ledger}, bookies)
        reader = reads.reader(WHERE, EntryId(LEDGER, 0))
        found: list[EntryId] = []
        while not reader.at_end():
            found += [block.id for block in reader.read(0)]
    assert found == [EntryId(LEDGER, one) for one in range(at)]
    assert broker.asked == [EntryId(LEDGER, at)]
    assert reads.from_storage[LEDGER] == at
    assert reads.left == {LEDGER: WHY}
