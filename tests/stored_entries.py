"""Entries as a producer and a broker write them: an encoder that shares no code with the decoders.

``python -m tests.proofs entries --seeds 1000000`` decodes random and damaged entries with both
decoders.
"""

from __future__ import annotations

import random
import struct
import zlib
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import google_crc32c
import pyarrow as pa
import pytest
from hypothesis import strategies as st
from msgspec.structs import replace

from keyshard.broker.wire import decoding, native_decoder
from keyshard.broker.wire.decoding import decode
from keyshard.broker.wire.entries import Decoded, RawEntry
from keyshard.columns.content import CONTENT, METADATA
from keyshard.columns.messages import messages_of
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.protobuf import Value, message
from tests.proofs.runner import Options, Outcomes, Proof, outcome_of

WHERE = TopicPartition("persistent://public/default/t", 2)
ID = EntryId(7, 11)
EVERYTHING = (*CONTENT.names, *METADATA.names)
NONE, LZ4, ZLIB, ZSTD, SNAPPY = range(5)
TEXT = st.text(max_size=8)
MESSAGES = st.fixed_dictionaries(
    {
        "value": st.none() | st.binary(max_size=40),
        "key": st.none() | TEXT,
        "key_bytes": st.none() | st.binary(max_size=9),
        "ordering_key": st.none() | TEXT,
        "properties": st.dictionaries(TEXT, TEXT, max_size=2),
        "event_ms": st.sampled_from([0, 1, 1_700_000_000_123]),
        "sequence_id": st.none() | st.integers(0, 2**64 - 1),
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
    """Return the stored bytes of an entry: checksum, metadata, payload."""
    body = struct.pack(">I", len(metadata)) + metadata + payload
    if checked:
        body = b"\x0e\x01" + struct.pack(">I", google_crc32c.value(body)) + body
    return with_broker(broker, body) if broker else body


def with_broker(broker: bytes, body: bytes) -> bytes:
    """Return the broker's metadata that precedes the stored bytes of an entry."""
    return b"\x0e\x02" + struct.pack(">I", len(broker)) + broker + body


def batch_payload(messages: list[dict[str, Any]]) -> bytes:
    payload = b""
    for one in messages:
        value = one["value"] or b""
        fields: dict[int, Value] = keys_of(one, 2, 6, 7) | {3: len(value)}
        if (sequence_id := one.get("sequence_id", 5)) is not None:
            fields[8] = sequence_id
        if one["event_ms"]:
            fields[5] = one["event_ms"]
        if one["value"] is None:
            fields[9] = 1
        single = properties_of(one, 1) + message(fields)
        payload += struct.pack(">I", len(single)) + single + value
    return payload


def of_kafka(
    count: int, form: bytes = b"kafka", *, offset: int = 0
) -> tuple[dict[int, Value], bytes]:
    """Return metadata and payload of an entry as KoP stores it: a record batch of Kafka, version 2.

    Args:
        count: Number of its records.
        form: Name of the format.
        offset: Offset of its first record.
    """
    records = b""
    for number in range(count):
        value = b"v%d" % number
        # Attributes, times, the lengths of key and value (zigzag), and no headers.
        record = b"\0\0" + bytes([2 * number, 2]) + b"k" + bytes([2 * len(value)]) + value + b"\0"
        records += bytes([2 * len(record)]) + record
    head = struct.pack(">hiqqqhii", 0, count - 1, PUBLISHED, PUBLISHED, -1, -1, -1, count)
    checked = head + records
    crc = google_crc32c.value(checked)
    batch = struct.pack(">ibI", 0, 2, crc) + checked
    metadata: dict[int, Value] = {11: count, 4: message({1: b"entry.format", 2: form})}
    return metadata, struct.pack(">qi", offset, len(batch)) + batch


PUBLISHED = 1_700_000_000_000
BASE: dict[int, Value] = {1: b"producer", 2: 3, 3: 1_700_000_000_000}


def versioned(
    schema_version: bytes | None, replicated_from: bytes | None = None
) -> dict[int, Value]:
    """``BASE``, with the version of the schema and the name of the cluster."""
    fields = BASE if schema_version is None else BASE | {16: schema_version}
    return fields if replicated_from is None else fields | {5: replicated_from}


def batch(
    messages: list[dict[str, Any]],
    compression: int = NONE,
    schema_version: bytes | None = None,
    replicated_from: bytes | None = None,
    **how: Any,
) -> bytes:
    payload = batch_payload(messages)
    fields = versioned(schema_version, replicated_from) | {
        8: compression,
        9: len(payload),
        11: len(messages),
    }
    return stored(message(fields), packed(payload, compression), **how)


def single(
    one: dict[str, Any],
    compression: int = NONE,
    schema_version: bytes | None = None,
    replicated_from: bytes | None = None,
    **how: Any,
) -> bytes:
    keys, value = keys_of(one, 6, 17, 18), one["value"] or b""
    fields = versioned(schema_version, replicated_from) | keys | {8: compression, 9: len(value)}
    if one["event_ms"]:
        fields[12] = one["event_ms"]
    if one["value"] is None:
        fields[25] = 1
    metadata = properties_of(one, 4) + message(fields)
    return stored(metadata, packed(value, compression), **how)


def raw(data: bytes, ack_set: tuple[int, ...] = (), *, redelivered: bool = False) -> RawEntry:
    return RawEntry(ID, b"head" + data, 4, redelivered, ack_set)


def decoded(*data: bytes, **how: Any) -> Decoded:
    return decode([raw(one) for one in data], WHERE, **how)


def plain(value: bytes | None = b"v", key: str | None = "k") -> dict[str, Any]:
    return {
        "value": value, "key": key, "key_bytes": None, "ordering_key": None, "properties": {},
        "event_ms": 0, "sequence_id": 5,
    }  # fmt: skip


def memory_of(messages: Sequence[dict[str, Any]], producer: bytes = b"producer") -> int:
    """Bytes that messages count against the limit of an entry."""
    found = 0
    for one in messages:
        keys = keys_of(one, 2, 6, 7)
        key, ordering_key = (keys.get(number, b"") for number in (2, 7))
        assert isinstance(key, bytes)
        assert isinstance(ordering_key, bytes)
        found += 256 + len(one["value"] or b"") + 2 * len(key + ordering_key) + len(producer)
        found += sum(192 + len((k + v).encode()) for k, v in one["properties"].items())
    return found


@contextmanager
def memory_max(limit: int) -> Iterator[None]:
    """With another limit for the memory of an entry, in both decoders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "ENTRY_MEMORY_MAX", limit)
        patch.setattr(
            native_decoder,
            "_LIMITS",
            (native_decoder._LIMITS[0], limit, *native_decoder._LIMITS[2:]),
        )
        yield


COUNTS = (-(2**31), -1, 0, 2, 1_000_000, 1_000_001, 2**31 - 1, 2**31, 2**32 - 1, 2**63)
"""Numbers that a batch may declare to have of messages."""


def extreme(draw: random.Random, rows_max: int = 20_000_000) -> bytes:
    """An entry that is small and claims or unpacks to much, or that is encrypted."""
    compression = draw.choice([LZ4, ZLIB, ZSTD, SNAPPY])

    def of(one: bytes, count: int, producer: bytes = b"p", value: bytes = b"") -> bytes:
        said = struct.pack(">I", len(one)) + one
        payload = said * (count if not value else 1) + value
        fields = BASE | {1: producer, 8: compression, 9: len(payload), 11: count}
        return stored(message(fields), packed(payload, compression))

    pair = message({1: message({1: b"", 2: draw.choice([b"", b"v", b"\xff"])})})
    key = draw.choice([b"", b"k", b"k" * 100, b"\xff"])
    rows = draw.choice([1, 100, 3_000, 1_000_001, 3_000_000, 20_000_000])
    kinds = [
        lambda: stored(message(BASE | {11: draw.choice(COUNTS) % 2**64}), batch_payload([plain()])),
        lambda: of(message({3: 0}), min(rows, rows_max)),
        lambda: of(message({2: key, 3: 0}), min(rows, rows_max, 3_000_000)),
        lambda: of(pair * min(rows, rows_max, 3_000_000) + message({3: 0}), 1),
        lambda: of(pair * 30 + message({2: key, 3: 0}), min(rows, rows_max, 3_000)),
        lambda: of(message({3: 0}), 1_000, b"p" * draw.choice([100_000, 1_000_000])),
        lambda: of(message({3: 20_000_000}), 1, value=bytes(20_000_000)),
        lambda: stored(message(BASE | {11: draw.choice(COUNTS) % 2**64, 13: b"\x0a\x01k"}), b"?"),
    ]
    return draw.choice(kinds)()


DAMAGE = st.one_of(
    st.tuples(st.just("cut"), st.integers(0, 400), st.just(0)),
    st.tuples(st.just("flip"), st.integers(0, 400), st.integers(1, 255)),
    st.tuples(st.just("insert"), st.integers(0, 400), st.integers(0, 255)),
)


def damaged(whole: bytes, damage: Sequence[tuple[str, int, int]]) -> bytes:
    """An entry with some of its bytes changed, and a checksum that fits."""
    body = bytearray(whole[6:])
    for kind, at, byte in damage:
        place = at % (len(body) + 1)
        if kind == "cut":
            del body[place:]
        elif kind == "insert":
            body[place:place] = bytes([byte])
        elif place < len(body):
            body[place] ^= byte
    return b"\x0e\x01" + struct.pack(">I", google_crc32c.value(bytes(body))) + bytes(body)


@contextmanager
def reference_only() -> Iterator[None]:
    """Without the compiled decoder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_decoder, "decode", lambda *_, **__: None)
        yield


def look_at(data: bytes) -> bool:
    """Decode bytes that may be no entry. An error must name the entry.

    If the compiled decoder answers, it must agree with the reference.

    Returns:
        Whether the bytes decoded to messages.
    """
    entries = [raw(data)]
    compiled = native_decoder.decode(entries, keeps_values=True, metadata=tuple(METADATA.names))
    with reference_only():
        found = decode(entries, WHERE, EVERYTHING)
    if found.refused is not None:
        assert (found.refused.facts["ledger"], found.refused.facts["entry"]) == ID
        assert not found.blocks
    for block in found.blocks:
        assert len(messages_of(WHERE, block)) == block.rows == len(block.indices)
    if compiled is not None:
        agree(compiled, found)
    return found.refused is None


def agree(compiled: Decoded, reference: Decoded) -> None:
    """Both say the same, column by column."""
    assert compiled[1:] == reference[1:]
    assert len(compiled.blocks) == len(reference.blocks)
    for one, other in zip(compiled.blocks, reference.blocks, strict=True):
        assert replace(one, content=None, start=0) == replace(
            other, content=None, start=0, indices=one.indices
        )
        assert list(one.indices) == list(other.indices)
        assert one.content.schema == other.content.schema
        for column in one.content.schema.names:
            assert one.column(column) == other.column(column)
        for part in one.parts:
            part.content.validate(full=True)


def _random_entry(draw: random.Random) -> bytes:
    """A batch or a single message, mostly damaged, or bytes that are nothing."""
    if not draw.randrange(8):
        return draw.randbytes(draw.randrange(200))
    if not draw.randrange(500):
        return extreme(draw)

    def text() -> str:
        return "".join(draw.choices("ab=+/é€\U0001f600\0 ", k=draw.randrange(6)))

    messages = [
        {
            "value": draw.choice([None, *[draw.randbytes(draw.randrange(40))] * 4]),
            "key": draw.choice([None, text()]),
            "key_bytes": draw.choice([None, None, None, draw.randbytes(draw.randrange(9))]),
            "ordering_key": draw.choice([None, None, None, text()]),
            "properties": {text(): text() for _ in range(draw.choice([0, 0, 0, 1, 2]))},
            "event_ms": draw.choice([0, 0, 1, 1_700_000_000_123, 2**63]),
            "sequence_id": draw.choice([None, 0, 1, draw.getrandbits(64)]),
        }
        for _ in range(draw.randrange(1, 5))
    ]
    compression = draw.choice([NONE, NONE, NONE, LZ4, ZLIB, ZSTD, SNAPPY])
    version = draw.choice([None, None, draw.randbytes(8), bytes(8), draw.randbytes(3)])
    replicated = draw.choice([None, None, b"", b"eu-west", draw.randbytes(3)])
    if draw.randrange(4):
        whole = batch(messages, compression, version, replicated)
    else:
        whole = single(messages[0], compression, version, replicated)
    damage = [
        (
            draw.choice(["cut", "flip", "flip", "insert"]),
            draw.randrange(400),
            draw.randrange(1, 256),
        )
        for _ in range(draw.choice([0, 1, 1, 2, 4]))
    ]
    found = damaged(whole, damage)
    time_ms = draw.choice([0, 1, 1_700_000_000_123, 2**63])
    broker = draw.choice([b"", b"", message({1: time_ms, 2: 7}), draw.randbytes(5)])
    return with_broker(broker, found) if broker else found


def _look_at(seed: int) -> Counter[str]:
    return Counter({"messages of them": int(look_at(_random_entry(random.Random(seed))))})


def _outcomes(_: Options, seeds: range) -> Outcomes:
    print(f"compiled: {native_decoder.is_available()}")
    for seed in seeds:
        yield outcome_of(seed, _look_at)


PROOF = Proof(_outcomes, seeds=100_000, seed_start=0)
