"""Entries decoded from their bytes, against an encoder that shares no code with the decoder."""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode
from typing import Any

import google_crc32c
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyshard.arrow.messages import messages_of
from keyshard.broker.pulsar.protobuf import Value, message
from keyshard.broker.wire import decoding
from keyshard.broker.wire.decoding import Decoded, RawEntry, decode
from keyshard.core.message import Message
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.ring.key_slot import key_slot
from keyshard.errors import ChunkedMessageError, CorruptEntryError, EncryptedMessageError

WHERE = TopicPartition("persistent://public/default/t", 2)
ID = EntryId(7, 11)
NONE, LZ4, ZLIB, ZSTD, SNAPPY = range(5)
TEXT = st.text(max_size=8)
MESSAGES = st.fixed_dictionaries(
    {
        "value": st.binary(max_size=40),
        "key": st.none() | TEXT,
        "key_bytes": st.none() | st.binary(min_size=1, max_size=9),
        "ordering_key": st.none() | TEXT,
        "properties": st.dictionaries(TEXT, TEXT, max_size=2),
        "event_ms": st.sampled_from([0, 1, 1_700_000_000_123]),
    }
)


def properties_of(one: dict[str, Any], number: int) -> bytes:
    pairs = (message({1: k.encode(), 2: v.encode()}) for k, v in one["properties"].items())
    return b"".join(message({number: pair}) for pair in pairs)


def keys_of(one: dict[str, Any], key: int, of_bytes: int, ordering_key: int) -> dict[int, Value]:
    found: dict[int, Value] = {}
    if one["key_bytes"] is not None:
        found |= {key: b64encode(one["key_bytes"]), of_bytes: 1}
    elif one["key"] is not None:
        found[key] = one["key"].encode()
    if one["ordering_key"] is not None:
        found[ordering_key] = one["ordering_key"].encode()
    return found


def packed(payload: bytes, compression: int) -> bytes:
    if compression == ZLIB:
        return zlib.compress(payload)
    names = {LZ4: "lz4_raw", ZSTD: "zstd", SNAPPY: "snappy"}
    if compression == NONE:
        return payload
    found: bytes = pa.Codec(names[compression]).compress(payload, asbytes=True)
    return found


def stored(metadata: bytes, payload: bytes, *, checked: bool = True, broker: bytes = b"") -> bytes:
    """What is stored of an entry: checksum, metadata, payload."""
    body = struct.pack(">I", len(metadata)) + metadata + payload
    if checked:
        body = b"\x0e\x01" + struct.pack(">I", google_crc32c.value(body)) + body
    return b"\x0e\x02" + struct.pack(">I", len(broker)) + broker + body if broker else body


def batch_payload(messages: list[dict[str, Any]]) -> bytes:
    payload = b""
    for one in messages:
        fields: dict[int, Value] = keys_of(one, 2, 6, 7) | {3: len(one["value"]), 8: 5}
        if one["event_ms"]:
            fields[5] = one["event_ms"]
        single = properties_of(one, 1) + message(fields)
        payload += struct.pack(">I", len(single)) + single + one["value"]
    return payload


BASE: dict[int, Value] = {1: b"producer", 2: 3, 3: 1_700_000_000_000}


def batch(messages: list[dict[str, Any]], compression: int = NONE, **how: Any) -> bytes:
    payload = batch_payload(messages)
    fields = BASE | {8: compression, 9: len(payload), 11: len(messages)}
    return stored(message(fields), packed(payload, compression), **how)


def single(one: dict[str, Any], compression: int = NONE, **how: Any) -> bytes:
    fields = BASE | keys_of(one, 6, 17, 18) | {8: compression, 9: len(one["value"])}
    if one["event_ms"]:
        fields[12] = one["event_ms"]
    metadata = properties_of(one, 4) + message(fields)
    return stored(metadata, packed(one["value"], compression), **how)


def raw(data: bytes, ack_set: tuple[int, ...] = (), *, redelivered: bool = False) -> RawEntry:
    return RawEntry(ID, redelivered, ack_set, b"head" + data, 4)


def decoded(*data: bytes, **how: Any) -> Decoded:
    return decode([raw(one) for one in data], WHERE, **how)


def plain(value: bytes = b"v", key: str | None = "k") -> dict[str, Any]:
    return {
        "value": value, "key": key, "key_bytes": None, "ordering_key": None, "properties": {},
        "event_ms": 0,
    }  # fmt: skip


def check(found: list[Message], sent: list[dict[str, Any]]) -> None:
    """The messages that were decoded are those that were encoded."""
    assert len(found) == len(sent)
    for got, one in zip(found, sent, strict=True):
        of_bytes = one["key_bytes"]
        text = b64encode(of_bytes).decode() if of_bytes is not None else one["key"]
        assert (got.value, got.key) == (one["value"], text or None)
        assert got.ordering_key == (one["ordering_key"] or None)
        assert got.properties == one["properties"]
        assert (got.event_time is None) == (not one["event_ms"])
        if one["event_ms"]:
            assert got.event_time is not None
            assert round(got.event_time.timestamp() * 1000) == one["event_ms"]
        routed_by = one["ordering_key"] or of_bytes or one["key"]
        assert got.slot == (key_slot(routed_by) if routed_by else None)


@given(
    st.lists(MESSAGES, min_size=1, max_size=6),
    st.sampled_from(range(5)),
    st.booleans(),
    st.sampled_from([b"", b"broker"]),
)
@settings(deadline=None, max_examples=40)
def test_a_batch_is_what_its_producer_wrote(
    messages: list[dict[str, Any]], compression: int, checked: bool, broker: bytes
) -> None:
    found = decoded(batch(messages, compression, checked=checked, broker=broker))
    assert found.refused is None
    assert found.messages == len(messages)
    (block,) = found.blocks
    assert (block.id, block.batch_size, block.batched, block.whole) == (
        ID, len(messages), True, True,
    )  # fmt: skip
    assert block.payload_bytes == sum(len(one["value"]) for one in messages)
    check(messages_of(WHERE, block), messages)


@given(st.lists(MESSAGES, min_size=1, max_size=4), st.sampled_from(range(5)))
@settings(deadline=None, max_examples=40)
def test_several_entries_are_decoded_together(
    messages: list[dict[str, Any]], compression: int
) -> None:
    found = decoded(*[single(one, compression) for one in messages], batch(messages, compression))
    assert found.refused is None
    assert [block.rows for block in found.blocks] == [1] * len(messages) + [len(messages)]
    check([m for block in found.blocks for m in messages_of(WHERE, block)], messages * 2)
    assert not found.blocks[0].batched
    assert found.blocks[0].keys_of_bytes == bool(
        messages[0]["key_bytes"] and not messages[0]["ordering_key"]
    )


@given(st.integers(1, 140), st.data())
@settings(deadline=None, max_examples=40)
def test_of_a_partly_acknowledged_batch_the_rest_comes(count: int, data: st.DataObject) -> None:
    kept = data.draw(st.sets(st.integers(0, count - 1), min_size=1))
    words = [0] * (count // 64 + 1)
    for index in kept:
        words[index // 64] |= 1 << index % 64
    signed = tuple(word - (1 << 64) if word >> 63 else word for word in words)
    messages = [plain(b"%d" % index) for index in range(count)]
    found = decode([raw(batch(messages), signed, redelivered=True)], WHERE)
    (block,) = found.blocks
    assert list(block.indices) == sorted(kept)
    assert block.values == [b"%d" % index for index in sorted(kept)]
    assert (block.batch_size, block.redelivered, found.messages) == (count, True, len(kept))


def test_a_batch_of_which_nothing_is_left_is_no_block() -> None:
    found = decode([raw(batch([plain()]), (0,))], WHERE)
    assert (found.blocks, found.refused, found.messages) == ([], None, 0)


def corrupt(data: bytes) -> str:
    found = decoded(single(plain(b"before")), data)
    assert isinstance(found.refused, CorruptEntryError), found.refused
    assert (found.refused.facts["ledger"], found.refused.facts["entry"]) == ID
    assert [block.values for block in found.blocks] == [[b"before"]]
    return found.refused.message


def test_what_is_wrong_with_an_entry_is_named_and_what_came_before_is_handed_out() -> None:
    good = batch([plain(), plain()])
    assert "checksum" in corrupt(good[:-1] + b"?")
    two = batch_payload([plain(), plain()])
    assert "bytes more" in corrupt(stored(message(BASE | {11: 1}), two))
    assert "too early" in corrupt(stored(message(BASE | {11: 3}), two))
    assert "cannot hold" in corrupt(stored(message(BASE | {11: 2**31 - 1}), two))
    assert "cannot hold" in corrupt(stored(message(BASE | {11: 2**64 - 1}), two))
    assert "compression" in corrupt(stored(message(BASE | {8: 9, 9: 1}), b"x"))
    assert "too early" in corrupt(stored(b"\x0a", b""))
    assert "too early" in corrupt(b"")


@pytest.mark.parametrize("compression", [LZ4, ZLIB, ZSTD, SNAPPY])
@pytest.mark.parametrize("declared", [0, 4, 6, 1_000, 2**31])
@pytest.mark.parametrize("batched", [False, True])
def test_content_of_another_size_than_declared_is_no_content(
    compression: int, declared: int, batched: bool
) -> None:
    payload = batch_payload([plain()]) if batched else b"12345"
    fields: dict[int, Value] = BASE | {8: compression, 9: declared} | ({11: 1} if batched else {})
    assert corrupt(stored(message(fields), packed(payload, compression)))


def test_a_bomb_is_refused_before_it_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "UNPACKED_BYTES_MAX", 1_000)
    bomb = stored(message(BASE | {8: ZLIB, 9: 1_001}), zlib.compress(bytes(1_001)))
    assert "more than 1000" in corrupt(bomb)
    small = stored(message(BASE | {8: ZLIB, 9: 1_000}), zlib.compress(bytes(100_000)))
    assert "unpacked" in corrupt(small)


def test_chunked_and_encrypted_entries_are_refused_by_their_own_id() -> None:
    chunk = stored(message(BASE | {27: 2, 29: 0}), b"part")
    assert isinstance(decoded(chunk).refused, ChunkedMessageError)
    encrypted = stored(message(BASE | {11: 3, 13: message({1: b"k", 2: b"v"})}), b"?")
    found = decoded(encrypted, single(plain()), encrypted_too=True)
    assert (found.blocks, type(found.refused)) == ([], EncryptedMessageError)
    found = decoded(encrypted, single(plain()))
    assert (found.refused, found.left_out, len(found.blocks), found.messages) == (None, ID, 1, 4)


DAMAGE = st.one_of(
    st.tuples(st.just("cut"), st.integers(0, 400), st.just(0)),
    st.tuples(st.just("flip"), st.integers(0, 400), st.integers(1, 255)),
    st.tuples(st.just("insert"), st.integers(0, 400), st.integers(0, 255)),
)


@given(
    st.lists(MESSAGES, min_size=1, max_size=3),
    st.sampled_from(range(5)),
    st.lists(DAMAGE, min_size=1, max_size=4),
    st.booleans(),
)
@settings(deadline=None, max_examples=150)
def test_damaged_entries_are_an_error_that_names_them_or_messages(
    messages: list[dict[str, Any]], compression: int, damage: list[Any], batched: bool
) -> None:
    """With a checksum that fits, so that the damage comes as far as it can."""
    whole = batch(messages, compression) if batched else single(messages[0], compression)
    body = bytearray(whole[6:])
    for kind, at, byte in damage:
        place = at % (len(body) + 1)
        if kind == "cut":
            del body[place:]
        elif kind == "insert":
            body[place:place] = bytes([byte])
        elif place < len(body):
            body[place] ^= byte
    checksum = struct.pack(">I", google_crc32c.value(bytes(body)))
    look_at(b"\x0e\x01" + checksum + bytes(body))


@given(st.binary(max_size=200))
@settings(deadline=None, max_examples=100)
def test_random_bytes_are_an_error_that_names_the_entry_or_a_message(data: bytes) -> None:
    look_at(data)


def look_at(data: bytes) -> None:
    found = decode([raw(data)], WHERE)
    if found.refused is not None:
        assert (found.refused.facts["ledger"], found.refused.facts["entry"]) == ID
        assert not found.blocks
    for block in found.blocks:
        assert len(messages_of(WHERE, block)) == block.rows == len(block.indices)
