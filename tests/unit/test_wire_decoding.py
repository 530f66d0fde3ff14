"""Entries decoded from their bytes."""

from __future__ import annotations

import random
import shutil
import struct
import subprocess
import zlib
from base64 import b64encode
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyshard.broker.wire import compression as unpacking
from keyshard.broker.wire import native_decoder, native_encoder
from keyshard.broker.wire.decoding import decode
from keyshard.columns.content import CONTENT, TIME_MS_MAX
from keyshard.columns.messages import messages_of
from keyshard.core.message import Message
from keyshard.core.protobuf import Value, message
from keyshard.core.ring.key_slot import key_slot
from keyshard.errors import ChunkedMessageError, CorruptEntryError, EncryptedMessageError
from tests.helpers import present
from tests.stored_entries import (
    BASE,
    DAMAGE,
    EVERYTHING,
    ID,
    LZ4,
    MESSAGES,
    NONE,
    SNAPPY,
    WHERE,
    ZLIB,
    ZSTD,
    batch,
    batch_payload,
    damaged,
    decoded,
    extreme,
    look_at,
    memory_max,
    memory_of,
    of_kafka,
    packed,
    plain,
    raw,
    reference_only,
    single,
    stored,
    with_broker,
)
from tests.support.deadlines import deadline


@pytest.fixture(scope="module", params=["compiled", "not_copied", "reference"], autouse=True)
def decoder(request: pytest.FixtureRequest) -> Iterator[None]:
    """Choose the decoder: the compiled one or the reference.

    The compiled one copies small frames into one buffer, or, if "not_copied", decodes all in place.
    """
    if request.param == "reference":
        with reference_only():
            yield
    elif native_decoder.is_available():
        with pytest.MonkeyPatch.context() as patch:
            if request.param == "not_copied":
                patch.setattr(native_decoder, "COPIED_BYTES_MAX", -1)
            yield
    else:
        pytest.skip("the install built no decoder")


def compiles(folder: Path) -> bool:
    """Whether a compiler is there that makes a library; rustup has one without a toolchain."""
    compiler = shutil.which("rustc")
    if compiler is None:
        return False
    source = folder / "library.rs"
    source.write_text('#[no_mangle] pub extern "C" fn one() -> i32 { 1 }\n')
    command = [compiler, "--crate-type", "cdylib", "-o", str(folder / "library.so"), str(source)]
    return (
        subprocess.run(command, capture_output=True, timeout=deadline(120), check=False).returncode
        == 0
    )


def test_compiled_code_is_there_where_it_can_be_built(tmp_path: Path) -> None:
    available = (native_decoder.is_available(), native_encoder.is_available())
    assert available == (compiles(tmp_path),) * 2


def check(found: list[Message], sent: list[dict[str, Any]]) -> None:
    """Assert that the decoded messages are those that were encoded."""
    assert len(found) == len(sent)
    for got, one in zip(found, sent, strict=True):
        of_bytes = one["key_bytes"]
        text = b64encode(of_bytes).decode() if of_bytes is not None else one["key"]
        assert (got.value, got.key) == (one["value"], text)
        assert got.ordering_key == one["ordering_key"]
        assert got.properties == one["properties"]
        assert (got.event_time is None) == (not one["event_ms"])
        if one["event_ms"]:
            assert got.event_time is not None
            assert round(got.event_time.timestamp() * 1000) == one["event_ms"]
        of_message = one["key"] if of_bytes is None else of_bytes
        routed_by = of_message if one["ordering_key"] is None else one["ordering_key"]
        assert got.slot == (None if routed_by is None else key_slot(routed_by))


@given(
    st.lists(MESSAGES, min_size=1, max_size=6),
    st.sampled_from(range(5)),
    st.booleans(),
    st.sampled_from([b"", b"broker"]),
)
@settings(deadline=None, max_examples=40)
def test_a_batch_has_the_messages_of_its_producer(
    messages: list[dict[str, Any]], compression: int, checked: bool, broker: bytes
) -> None:
    found = decoded(batch(messages, compression, checked=checked, broker=broker))
    assert found.refused is None
    assert found.messages == len(messages)
    (block,) = found.blocks
    assert (block.id, block.batch_size, block.batched, block.whole, block.complete) == (
        ID, len(messages), True, True, True,
    )  # fmt: skip
    assert block.payload_bytes == sum(len(one["value"] or b"") for one in messages)
    check(messages_of(WHERE, block), messages)


@pytest.mark.parametrize(
    ("written", "output"),
    [
        (None, None),
        (bytes(8), 0),
        (bytes(7) + b"\x02", 2),
        (b"\x7f" + b"\xff" * 7, 2**63 - 1),
        (b"\xff" * 8, None),
        (b"\x01", None),
        (b"", None),
    ],
)
def test_the_schema_version_is_reported_if_it_is_a_valid_number(
    written: bytes | None, output: int | None
) -> None:
    found = decoded(batch([plain()] * 2, NONE, written), single(plain(), NONE, written))
    assert [block.schema_version for block in found.blocks] == [output, output]


@given(
    st.lists(MESSAGES, min_size=1, max_size=4),
    st.sampled_from(range(5)),
    st.none() | st.integers(0, 2**63),
)
@settings(deadline=None, max_examples=40)
def test_metadata_columns_hold_the_written_values(
    messages: list[dict[str, Any]], compression: int, time_ms: int | None
) -> None:
    broker = b"" if time_ms is None else message({1: time_ms, 2: 9})
    one_by_one = [single(one, compression, broker=broker) for one in messages]
    found = decoded(batch(messages, compression, broker=broker), *one_by_one, columns=EVERYTHING)
    rows = [dict(zip(EVERYTHING, row, strict=True)) for block in found.blocks for row in zip(
        *(block.column(name) for name in EVERYTHING), strict=True
    )]  # fmt: skip
    keys = [one["key"] and one["key"].encode() for one in messages]
    texts = [b"" if one["key"] == "" else key for one, key in zip(messages, keys, strict=True)]
    wanted = [
        text if one["key_bytes"] is None else one["key_bytes"]
        for one, text in zip(messages, texts, strict=True)
    ]
    assert [row["__keyBytes"] for row in rows] == wanted * 2
    signed = [_signed(one["sequence_id"]) for one in messages]
    assert [row["__sequenceId"] for row in rows] == [*signed, *[3] * len(messages)]
    assert {row["__producer"] for row in rows} == {"producer"}
    for row in rows:
        stored_at = row["__brokerPublishTime"]
        if time_ms is None or not 0 < time_ms < TIME_MS_MAX:
            assert stored_at is None
        else:
            assert stored_at == datetime.fromtimestamp(0, timezone.utc) + timedelta(
                milliseconds=time_ms
            )


def _signed(number: int | None) -> int | None:
    return number if number is None or number < 2**63 else number - 2**64


def test_columns_that_nobody_reads_are_not_built() -> None:
    whole = batch([plain()] * 2, broker=message({1: 1_700_000_000_000}))
    (block,) = decoded(whole).blocks
    assert block.content.schema == CONTENT
    (block,) = decoded(whole, columns=["value", "__producer"]).blocks
    assert block.content.schema.names == [*CONTENT.names, "__producer"]


@pytest.mark.parametrize(
    ("fields", "broker", "name", "shown"),
    [
        ({1: b"\xff\xfe"}, b"", "__producer", "\ufffd\ufffd"),
        ({1: b""}, b"", "__producer", ""),
        ({6: b"\xff"}, b"", "__keyBytes", b"\xff"),
        ({6: b"no base64!", 17: 1}, b"", "__keyBytes", b"no base64!"),
        ({6: b"QQ==", 17: 1, 18: b"ordered"}, b"", "__keyBytes", b"A"),
        ({6: b"QR==", 17: 1}, b"", "__keyBytes", b"A"),
        ({17: 1}, b"", "__keyBytes", None),
        ({}, b"\xff\xff", "__brokerPublishTime", None),
        ({}, message({1: b"text"}), "__brokerPublishTime", None),
        ({}, message({2: 5}), "__brokerPublishTime", None),
        ({5: b"eu-west"}, b"", "__replicatedFrom", "eu-west"),
        ({5: b""}, b"", "__replicatedFrom", ""),
        ({5: b"\xff"}, b"", "__replicatedFrom", "\ufffd"),
        ({5: 7}, b"", "__replicatedFrom", None),
        ({}, b"", "__replicatedFrom", None),
        ({19: 86_400_000}, b"", "__deliverAt", datetime(1970, 1, 2, tzinfo=timezone.utc)),
        ({19: 2**63 - 1}, b"", "__deliverAt", None),
        ({19: b"text"}, b"", "__deliverAt", None),
        ({}, b"", "__deliverAt", None),
    ],
)
def test_invalid_metadata_becomes_the_nearest_value_or_null(
    fields: dict[int, Value], broker: bytes, name: str, shown: object
) -> None:
    whole = stored(message(BASE | fields), b"value", broker=broker)
    found = decoded(whole, single(plain()), columns=EVERYTHING)
    assert found.refused is None
    assert found.blocks[0].column(name) == [shown]
    assert look_at(whole)


def test_messages_of_a_replicated_batch_name_its_cluster_and_count_it_in_their_memory() -> None:
    sent = [plain()] * 3
    fields = BASE | {5: b"us-east", 11: len(sent)}
    replicated = stored(message(fields), batch_payload(sent))
    limit = memory_of(sent) + len(sent) * len(b"us-east")
    with memory_max(limit):
        found = decoded(replicated, batch(sent), columns=EVERYTHING)
        (theirs, ours) = found.blocks
        assert theirs.column("__replicatedFrom") == ["us-east"] * 3
        assert ours.column("__replicatedFrom") == [None] * 3
    with memory_max(limit - 1):
        assert isinstance(decoded(replicated).refused, CorruptEntryError)
    assert look_at(replicated)


def test_a_refused_entry_leaves_no_rows_in_the_content() -> None:
    bad = stored(message(BASE | {11: 3}), batch_payload([plain()] * 2))
    found = decoded(single(plain()), bad, columns=EVERYTHING)
    assert found.refused is not None
    assert found.blocks[0].content.num_rows == 1


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
    of_bytes = [one["key_bytes"] is not None and one["ordering_key"] is None for one in messages]
    assert [block.keys_of_bytes for block in found.blocks] == [*of_bytes, any(of_bytes)]


@pytest.mark.parametrize("first", [plain(key="text"), plain(key="a"), plain(key=None)])
def test_slots_of_a_batch_of_mixed_keys_are_those_of_the_texts(first: dict[str, Any]) -> None:
    """``__slot`` of a key of bytes is that of its base64 text, wherever its batch has it."""
    last = plain(key=None) | {"key_bytes": b"a"}
    (block,) = decoded(batch([first, last])).blocks
    of_first = None if first["key"] is None else key_slot(first["key"])
    assert block.slots == [of_first, key_slot(b"a")]
    assert block.text_slots == [of_first, key_slot("YQ==")]


@given(st.integers(1, 140), st.data())
@settings(deadline=None, max_examples=40)
def test_a_partly_acknowledged_batch_is_decoded_without_acknowledged_messages(
    count: int, data: st.DataObject
) -> None:
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
    assert (block.complete, block.ends) == (True, True)


def test_a_batch_of_which_nothing_is_left_is_no_block() -> None:
    found = decode([raw(batch([plain()]), (0,))], WHERE)
    assert (found.blocks, found.refused, found.messages) == ([], None, 0)


def corrupt(data: bytes) -> str:
    found = decoded(single(plain(b"before")), data)
    assert isinstance(found.refused, CorruptEntryError), found.refused
    assert (found.refused.facts["ledger"], found.refused.facts["entry"]) == ID
    assert [block.values for block in found.blocks] == [[b"before"]]
    return found.refused.message


def test_an_error_of_an_entry_comes_after_the_entries_before_it() -> None:
    good = batch([plain(), plain()])
    assert "checksum" in corrupt(good[:-1] + b"?")
    two = batch_payload([plain(), plain()])
    assert "bytes after its" in corrupt(stored(message(BASE | {11: 1}), two))
    assert "too early" in corrupt(stored(message(BASE | {11: 3}), two))
    assert "declare" in corrupt(stored(message(BASE | {11: 2**31 - 1}), two))
    assert "declare" in corrupt(stored(message(BASE | {11: 2**64 - 1}), two))
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


@pytest.mark.parametrize("compression", [LZ4, SNAPPY])
def test_a_batch_without_its_declared_messages_reads_no_foreign_memory(compression: int) -> None:
    whole, half = batch_payload([plain(b"a" * 40), plain()]), batch_payload([plain(b"a" * 40)])
    metadata = message(BASE | {8: compression, 9: len(whole), 11: 2})
    said = corrupt(stored(metadata, packed(half, compression)))
    assert f"not the declared {len(whole)} bytes" in said or "cannot be decompressed" in said


def test_a_bomb_is_refused_before_it_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacking, "UNPACKED_BYTES_MAX", 1_000)
    bomb = stored(message(BASE | {8: ZLIB, 9: 1_001}), zlib.compress(bytes(1_001)))
    assert "more than 1000" in corrupt(bomb)
    small = stored(message(BASE | {8: ZLIB, 9: 1_000}), zlib.compress(bytes(100_000)))
    assert "decompressed" in corrupt(small)


@pytest.mark.parametrize("compression", [NONE, ZSTD])
def test_entries_that_hold_much_are_decoded_one_after_the_other(compression: int) -> None:
    entries = [raw(batch([plain(bytes([i]) * 1_000)], compression)) for i in range(7)]
    portions = []
    while entries:
        found = decode(entries, WHERE, at_once_bytes=3_000)
        assert found.refused is None
        assert found.messages == len(found.blocks) == found.seen
        portions.append([present(block.values[0])[:1] for block in found.blocks])
        entries = entries[found.seen :]
    assert portions == [[b"\0", b"\1", b"\2"], [b"\3", b"\4", b"\5"], [b"\6"]]


@given(
    st.lists(MESSAGES, min_size=1, max_size=4),
    st.sampled_from(range(5)),
    st.booleans(),
    st.integers(-2, 2),
)
@settings(deadline=None, max_examples=60)
def test_both_decoders_refuse_entries_that_take_too_much_memory(
    messages: list[dict[str, Any]], compression: int, batched: bool, more: int
) -> None:
    messages = messages if batched else messages[:1]
    data = batch(messages, compression) if batched else single(messages[0], compression)
    takes = memory_of(messages)
    with memory_max(takes - more):
        found = decoded(data)
        compiled = native_decoder.decode([raw(data)], keeps_values=True)
    assert (found.refused is not None) == (more > 0)
    if found.refused is not None:
        assert f"more than {takes - more} bytes of memory" in found.refused.message
        assert compiled is None


@pytest.mark.parametrize("columns", [None, ["__key"], EVERYTHING])
def test_a_read_of_fewer_columns_is_refused_the_same(columns: list[str] | None) -> None:
    sent = [plain(b"v" * 100)] * 3
    with memory_max(memory_of(sent) - 1):
        assert isinstance(decode([raw(batch(sent))], WHERE, columns).refused, CorruptEntryError)
    with memory_max(memory_of(sent)):
        assert decode([raw(batch(sent))], WHERE, columns).refused is None


@pytest.mark.parametrize("count", [1_000_001, 20_000_000])
def test_an_entry_of_more_messages_than_an_entry_may_have_is_named(count: int) -> None:
    payload = (struct.pack(">I", 2) + message({3: 0})) * count
    metadata = message(BASE | {8: ZSTD, 9: len(payload), 11: count})
    said = corrupt(stored(metadata, packed(payload, ZSTD)))
    assert f"it declares {count} messages" in said
    assert "more than 1000000" in said


@pytest.mark.parametrize("seed", range(30))
def test_extreme_entries_become_messages_or_an_error_that_names_them(seed: int) -> None:
    look_at(extreme(random.Random(seed), 30_000))


def test_chunked_and_encrypted_entries_are_refused_by_their_own_id() -> None:
    chunk = stored(message(BASE | {27: 2, 29: 0}), b"part")
    assert isinstance(decoded(chunk).refused, ChunkedMessageError)
    encrypted = stored(message(BASE | {11: 3, 13: message({1: b"k", 2: b"v"})}), b"?")
    found = decoded(single(plain()), encrypted, single(plain()))
    assert isinstance(found.refused, EncryptedMessageError)
    assert found.refused.stored == encrypted
    assert (len(found.blocks), found.messages, found.seen) == (1, 4, 2)


@pytest.mark.parametrize("form", [b"kafka", b"mixed_kafka"])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 30])
@pytest.mark.parametrize("offset", [0, 5, 70_000])
def test_entries_in_the_format_of_kafka_are_named_as_such(
    form: bytes, count: int, offset: int
) -> None:
    metadata, payload = of_kafka(count, form, offset=offset)
    entry = stored(message(BASE | metadata), payload)
    found = decoded(single(plain()), entry, single(plain()))
    assert isinstance(found.refused, CorruptEntryError)
    assert "has the format of Kafka" in str(found.refused)
    assert "Set entryFormat=pulsar in KoP" in str(found.refused)
    assert found.refused.stored == entry
    assert (len(found.blocks), found.messages, found.seen) == (1, 1 + count, 2)


def test_a_property_of_a_message_names_no_format_of_its_entry() -> None:
    found = decoded(single(plain() | {"properties": {"entry.format": "kafka"}}))
    assert (found.refused, len(found.blocks)) == (None, 1)


@given(
    st.lists(MESSAGES, min_size=1, max_size=3),
    st.sampled_from(range(5)),
    st.lists(DAMAGE, min_size=1, max_size=4),
    st.booleans(),
    st.sampled_from([b"", message({1: 1_700_000_000_123}), b"\x08\x80", b"\x0a\x01\x02"]),
)
@settings(deadline=None, max_examples=150)
def test_damaged_entries_become_messages_or_an_error_that_names_them(
    messages: list[dict[str, Any]], compression: int, damage: list[Any], batched: bool,
    broker: bytes,
) -> None:  # fmt: skip
    """The checksum is valid, so that the damage reaches the decoder."""
    whole = batch(messages, compression) if batched else single(messages[0], compression)
    found = damaged(whole, damage)
    look_at(with_broker(broker, found) if broker else found)


@given(st.binary(max_size=200))
@settings(deadline=None, max_examples=100)
def test_random_bytes_are_an_error_that_names_the_entry_or_a_message(data: bytes) -> None:
    look_at(data)
