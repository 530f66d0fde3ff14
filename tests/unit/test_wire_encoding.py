"""Messages that are encoded as entries: the decoders read them back."""

from __future__ import annotations

import random
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyshard.broker.unconfirmed import Pending
from keyshard.broker.wire import encoding, native_encoder
from keyshard.broker.wire.encoding import EntryHead, encoded
from keyshard.columns.content import PROPERTIES, gather
from keyshard.columns.outgoing import Outgoing, OutgoingMessage, outgoing_from, outgoing_of
from keyshard.core.metadata_columns import KEY_BYTES, PRODUCER, SEQUENCE_ID
from tests.stored_entries import EVERYTHING, MESSAGES, decoded, reference_only

needs_library = pytest.mark.skipif(
    not native_encoder.is_available(), reason="the install built no encoder"
)


class Rows(Sequence[OutgoingMessage]):
    """This number of messages, with any content."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, at: Any) -> Any:
        raise NotImplementedError


COLUMNS = (
    "value", "__key", "__orderingKey", "__properties", KEY_BYTES, SEQUENCE_ID, PRODUCER,
)  # fmt: skip


def outgoing(messages: list[dict[str, Any]], *, of_bytes: bool) -> list[OutgoingMessage]:
    return [
        OutgoingMessage(
            one["value"],
            None if key is None else b64encode(key).decode() if of_bytes else key,
            one["ordering_key"], one["properties"] or None, one["event_ms"] or None,
            key_is_base64=of_bytes and key is not None,
        )
        for one in messages
        for key in [one["key_bytes" if of_bytes else "key"]]
    ]  # fmt: skip


@pytest.mark.parametrize("compiled", [True, False])
@given(
    messages=st.lists(MESSAGES, min_size=1, max_size=5),
    of_bytes=st.booleans(),
    compression=st.integers(0, 4),
    sequence_id=st.integers(0, 2**62),
    schema_version=st.sampled_from([b"", bytes(8), b"\0\0\0\0\0\0\0\x05"]),
)
def test_decoding_returns_the_encoded_messages(
    *, compiled: bool, messages: list[dict[str, Any]], of_bytes: bool, compression: int,
    sequence_id: int, schema_version: bytes,
) -> None:  # fmt: skip
    rows = outgoing(messages, of_bytes=of_bytes)
    head = EntryHead(b"me", 1_700_000_000_000, compression, schema_version)
    data = encoded(rows, head, sequence_id)
    if compiled:
        found = decoded(data, columns=EVERYTHING)
    else:
        with reference_only():
            found = decoded(data, columns=EVERYTHING)
    (block,) = found.blocks
    assert block.batched == (len(messages) > 1)
    assert block.publish_ms == 1_700_000_000_000
    columns = {name: gather([block], [name])[name].to_pylist() for name in COLUMNS}
    assert columns["value"] == [one["value"] for one in messages]
    if of_bytes:
        keys = [one["key_bytes"] for one in messages]
        assert columns["__key"] == [one.key for one in rows]
    else:
        keys = [None if one["key"] is None else one["key"].encode() for one in messages]
        assert columns["__key"] == [one["key"] for one in messages]
    assert columns[KEY_BYTES] == keys
    assert columns["__orderingKey"] == [one["ordering_key"] for one in messages]
    assert [dict(pairs or ()) for pairs in columns["__properties"]] == [
        one["properties"] for one in messages
    ]
    assert columns[SEQUENCE_ID] == list(range(sequence_id, sequence_id + len(messages)))
    assert columns[PRODUCER] == ["me"] * len(messages)


def columns_of(messages: list[dict[str, Any]], *, of_bytes: bool) -> Outgoing:
    times = [one["event_ms"] or None for one in messages]
    return outgoing_of(
        pa.record_batch(
            {
                "value": pa.array([one["value"] for one in messages], pa.binary()),
                "__keyBytes" if of_bytes else "__key": pa.array(
                    [one["key_bytes" if of_bytes else "key"] for one in messages],
                    pa.binary() if of_bytes else pa.string(),
                ),
                "__orderingKey": pa.array([one["ordering_key"] for one in messages], pa.string()),
                "__eventTime": pa.array(times, pa.timestamp("ms", "UTC")),
                "__properties": pa.array(
                    [list(one["properties"].items()) or None for one in messages], PROPERTIES
                ),
            }
        )
    )


def entries_of(
    columns: Outgoing, ends: list[int], head: EntryHead, sequence_id: int
) -> list[Pending]:
    return list(chain.from_iterable(native_encoder.encode_all(columns, ends, head, sequence_id)))


@needs_library
@given(
    messages=st.lists(MESSAGES, min_size=1, max_size=12),
    of_bytes=st.booleans(),
    cuts=st.sets(st.integers(1, 11)),
    before=st.integers(0, 5),
    at_once=st.sampled_from([1, 300, 2**20]),
    sequence_id=st.integers(0, 2**62),
    compressed_min=st.sampled_from([0, 10, 100, 4096]),
    deliver_at=st.none() | st.integers(1, 2**62),
    head=st.builds(
        EntryHead, st.binary(max_size=200), st.integers(0, 2**62), st.integers(0, 4),
        st.binary(max_size=8),
    ),
)  # fmt: skip
def test_compiled_code_encodes_as_the_reference(
    *, messages: list[dict[str, Any]], of_bytes: bool, cuts: set[int], before: int, at_once: int,
    sequence_id: int, compressed_min: int, deliver_at: int | None, head: EntryHead,
) -> None:  # fmt: skip
    # A slice of longer columns: its buffers begin before it.
    extra = (messages * 6)[:before]
    columns = columns_of(extra + messages, of_bytes=of_bytes)
    if deliver_at is not None:
        delayed = pa.repeat(pa.scalar(deliver_at, pa.int64()), len(columns))
        columns = replace(columns, deliver_at_ms=delayed)
    columns = columns.slice(before, before + len(messages))
    ends = [*sorted(cut for cut in cuts if cut < len(messages)), len(messages)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_encoder, "AT_ONCE_BYTES", at_once)
        for module in (native_encoder, encoding):
            patch.setattr(module, "COMPRESSED_BYTES_MIN", compressed_min)
        with patch.context() as compiled_only:
            compiled_only.setattr(native_encoder, "encoded", None)
            found = entries_of(columns, ends, head, sequence_id)
        patch.setattr(native_encoder, "_library", None)
        reference = entries_of(columns, ends, head, sequence_id)
    rows = [one._replace(deliver_at_ms=deliver_at) for one in outgoing(messages, of_bytes=of_bytes)]
    for (start, stop), compiled, plain in zip(pairwise([0, *ends]), found, reference, strict=True):
        assert list(compiled.rows) == list(plain.rows) == rows[start:stop]
        assert compiled.first == plain.first == sequence_id + start
        assert compiled.data == plain.data
    assert columns.sizes() == [one.size() for one in rows] or of_bytes


@needs_library
@given(
    producer_id=st.integers(0, 2**62),
    entries=st.lists(
        st.tuples(st.integers(1, 2**31 - 1), st.integers(0, 2**62), st.binary(max_size=300)),
        min_size=1, max_size=8,
    ),
)  # fmt: skip
def test_compiled_code_frames_entries_as_the_reference(
    producer_id: int, entries: list[tuple[int, int, bytes]]
) -> None:
    some = [Pending(Rows(count), first, data) for count, first, data in entries]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_encoder, "FRAMES_MIN", 1)
        found = native_encoder.frames(producer_id, some)
        patch.setattr(native_encoder, "_library", None)
        assert found == native_encoder.frames(producer_id, some)
    assert isinstance(found, bytearray), "the library made it"


@given(st.lists(MESSAGES, min_size=1, max_size=5), st.booleans())
def test_sizes_are_bounds_of_stored_bytes(messages: list[dict[str, Any]], of_bytes: bool) -> None:
    rows = outgoing(messages, of_bytes=of_bytes)
    if not of_bytes:
        assert outgoing_from(rows).messages(0, len(rows)) == rows
    head = EntryHead(b"", 1_700_000_000_000)
    for one in rows:
        assert len(encoded([one], head, 2**62)) <= one.size()
    assert len(encoded(rows, head, 2**62)) <= sum(one.size() for one in rows) + 64


def test_a_small_payload_is_stored_as_it_is() -> None:
    head = EntryHead(b"me", 1_700_000_000_000, 1)
    for size, packed in ((encoding.COMPRESSED_BYTES_MIN - 1, False), (10_000, True)):
        assert (len(encoded([OutgoingMessage(b"x" * size)], head, 0)) < size) == packed


@pytest.mark.parametrize("compression", [1, 2, 3, 4])
def test_a_payload_that_compression_does_not_make_smaller_is_stored_as_it_is(
    compression: int,
) -> None:
    """Else a value of the largest size would exceed the limit after it was checked."""
    noise = random.Random(0).randbytes(100_000)
    head = EntryHead(b"me", 1_700_000_000_000, compression)
    assert encoded([OutgoingMessage(noise)], head, 0).endswith(noise)
    columns = outgoing_from([OutgoingMessage(noise, "k")] * 2)
    for one in entries_of(columns, [1, 2], head, 0):
        assert one.data.endswith(noise)
