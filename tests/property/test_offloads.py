"""Offloaded ledgers of any shape, damaged or not: each entry is right, or an error says why."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from keyshard.core.position.entry import TopicPartition
from keyshard.offloads import map_file, offload_reader
from keyshard.offloads.offload_reader import OffloadNotReadError, OffloadReader, Offloads
from tests.support.offload_files import WAYS, Way, offloaded, write_offload

WHERE = TopicPartition("persistent://public/default/orders:~*é+1", 3)
LEDGER, UUID = 7, "69159350-21b1-4a0d-8ae6-19cb86fe9cd1"
ENTRY = st.one_of(
    st.binary(max_size=40),
    st.integers(100, 3_000).map(lambda size: bytes(range(256)) * (size // 256 + 1)),
    st.just(b"\xfe\xdc\xde\xad" * 5),
    st.just(b"\xff\xff\xff\xff" + bytes(range(100, 116))),
)


@contextmanager
def small_requests(fetch: int, parsed: int) -> Iterator[None]:
    """Fetch few bytes at once, and parse few."""
    with (
        patch.object(offload_reader, "FETCH_MIN_BYTES", fetch),
        patch.object(map_file, "PARSED_BYTES_MAX", parsed),
        patch.object(map_file, "HEAD_BYTES", 200),
    ):
        yield


def read(root: Path, entries: list[bytes], first: int, last: int, bytes_max: int) -> list[bytes]:
    ledger = offloaded(UUID, LEDGER, entries)
    reader = OffloadReader(Offloads(str(root)), WHERE, ledger, (first, last), bytes_max)
    found = []
    while more := reader.read():
        found += more
    assert [one.id for one in found] == [(LEDGER, number) for number in range(first, last + 1)]
    return [one.data[one.position :] for one in found]


@st.composite
def written(draw: st.DrawFn) -> tuple[Way, list[bytes], dict[str, int]]:
    return (
        draw(st.sampled_from(WAYS)),
        draw(st.lists(ENTRY, min_size=1, max_size=30)),
        {"block_bytes": draw(st.integers(200, 6_000)), "interval": draw(st.integers(1, 40))},
    )


@given(
    written(), st.data(), st.sampled_from([1, 7, 64, 1_000, 10**6]),
    st.sampled_from([1, 500, 10**6]), st.sampled_from([1, 300, 10**6]),
)  # fmt: skip
def test_any_entries_are_returned_as_they_were_written(
    ledger: tuple[Way, list[bytes], dict[str, int]], data: st.DataObject,
    fetch: int, parsed: int, bytes_max: int,
) -> None:  # fmt: skip
    way, entries, shape = ledger
    first = data.draw(st.integers(0, len(entries) - 1))
    last = data.draw(st.integers(first, len(entries) - 1))
    with tempfile.TemporaryDirectory() as folder, small_requests(fetch, parsed):
        write_offload(way, Path(folder), WHERE, UUID, LEDGER, entries, **shape)
        found = read(Path(folder), entries, first, last, bytes_max)
    assert found == entries[first : last + 1]


DAMAGE = st.tuples(
    st.sampled_from(["flip", "cut", "insert", "set"]), st.floats(0, 1, exclude_max=True),
    st.integers(0, 255),
)  # fmt: skip


def damaged(content: bytes, damage: tuple[str, float, int]) -> tuple[bytes, int]:
    kind, share, value = damage
    at = int(len(content) * share)
    if kind == "cut":
        return content[:at], at
    if kind == "insert":
        return content[:at] + bytes([value]) + content[at:], at
    other = content[at] ^ (1 << value % 8) if kind == "flip" else value
    return content[:at] + bytes([other]) + content[at + 1 :], at


@given(written(), st.booleans(), DAMAGE, st.sampled_from([7, 1_000, 10**6]), st.data())
def test_a_damaged_file_never_gives_other_entries(
    ledger: tuple[Way, list[bytes], dict[str, int]], of_index: bool,
    damage: tuple[str, float, int], fetch: int, data: st.DataObject,
) -> None:  # fmt: skip
    """Objects of blocks, and uncompressed values, have no checksum, so a byte of an entry may
    change unseen here. Each message of Pulsar has one, which decoding checks."""
    way, entries, shape = ledger
    first = data.draw(st.integers(0, len(entries) - 1))
    last = data.draw(st.integers(first, len(entries) - 1))
    wanted = entries[first : last + 1]
    with tempfile.TemporaryDirectory() as folder, small_requests(fetch, 10**6):
        files = write_offload(way, Path(folder), WHERE, UUID, LEDGER, entries, **shape)
        path = files[of_index]
        content, _ = damaged(path.read_bytes(), damage)
        path.write_bytes(content)
        try:
            found = read(Path(folder), entries, first, last, 10**6)
        except OffloadNotReadError:
            return
    if way in ("BLOCK", "RECORD") or of_index:
        assert found == wanted
    else:
        changed = [(one, other) for one, other in zip(found, wanted, strict=True) if one != other]
        assert len(changed) <= 1
        assert all(one not in entries or len(one) == len(other) for one, other in changed)
