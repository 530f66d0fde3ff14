"""Frames of the wire transport: whole, invalid or too large."""

from __future__ import annotations

import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyshard.broker import framing
from keyshard.broker.framing import FrameReader, ProtocolError
from keyshard.broker.wire.frames import read_frames


@given(st.lists(st.binary(min_size=4, max_size=50), max_size=6), st.data())
def test_frames_are_whole_however_they_are_split(frames: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(struct.pack(">I", len(one)) + one for one in frames)
    reader, found, position = FrameReader(100), [], 0
    while position < len(stream):
        size = data.draw(st.integers(1, len(stream) - position))
        found += reader.feed(stream[position : position + size])
        position += size
    assert found == frames


@given(st.binary(max_size=100))
def test_invalid_frames_are_an_error(data: bytes) -> None:
    with suppress(ProtocolError):
        for frame in FrameReader(50).feed(data):
            list(read_frames([frame]))


def test_an_invalid_size_is_refused_at_once() -> None:
    for size in (0, 3, 51, 2**32 - 1):
        with pytest.raises(ProtocolError):
            FrameReader(50).feed(struct.pack(">I", size))


@given(st.data())
def test_the_beginning_of_large_frames_is_kept_however_they_are_split(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(4, 60), max_size=6))
    sent = [bytes([number]) * size for number, size in enumerate(sizes)]
    stream = b"".join(struct.pack(">I", len(one)) + one for one in sent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(framing, "KEPT_BYTES_MAX", 20)
        patch.setattr(framing, "HEAD_BYTES", 8)
        reader, found, position = FrameReader(100), [], 0
        while position < len(stream):
            size = data.draw(st.integers(1, len(stream) - position))
            found += reader.feed(stream[position : position + size])
            position += size
            assert len(reader._rest) <= 24
    assert found == [one if len(one) <= 20 else one[:8] for one in sent]
