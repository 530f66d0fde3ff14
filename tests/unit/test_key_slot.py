"""The slot of a key, checked against a Murmur hash written down here a second time."""

from __future__ import annotations

import pytest

from keyshard.core.ring.key_slot import broker_text, key_slot, possible_slots, routing_key


def murmur3_32(data: bytes) -> int:
    """MurmurHash3 x86 32, seed 0, after its reference in C++."""

    def rotated(value: int, bits: int) -> int:
        return (value << bits | value >> 32 - bits) & 0xFFFFFFFF

    def mixed(word: int) -> int:
        return rotated(word * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF

    result = 0
    whole = len(data) // 4 * 4
    for at in range(0, whole, 4):
        result ^= mixed(int.from_bytes(data[at : at + 4], "little"))
        result = (rotated(result, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF
    result ^= mixed(int.from_bytes(data[whole:], "little"))
    result ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        result = (result ^ result >> shift) * factor & 0xFFFFFFFF
    return result ^ result >> 16


def test_the_hash_written_down_here_gives_the_published_values() -> None:
    assert murmur3_32(b"") == 0
    assert murmur3_32(b"test") == 0xBA6BD213
    assert murmur3_32(b"Hello, world!") == 0xC0363E43
    assert murmur3_32(b"The quick brown fox jumps over the lazy dog") == 0x2E4FF723


KEYS = ["a", "ab", "abc", "abcd", "abcde", "order-1", "customer/42", "Zürich", "日本", "\x00", " "]


def test_a_key_goes_where_pulsar_sends_it() -> None:
    for key in (*KEYS, *(f"key-{i}" for i in range(1_000))):
        expected = (murmur3_32(key.encode()) & 0x7FFFFFFF) % 65_536 or 1
        assert key_slot(key) == expected, key
        assert key_slot(key.encode()) == expected, key


def test_the_sign_bit_of_the_hash_is_dropped_before_the_remainder() -> None:
    signed = [key for key in map(str, range(50)) if murmur3_32(key.encode()) >= 1 << 31]
    assert signed
    assert all(0 < key_slot(key) < 65_536 for key in signed)


def test_the_empty_key_has_slot_1() -> None:
    assert key_slot("") == 1


@pytest.mark.parametrize("key", ["k179888", "k389209"])
def test_slot_0_becomes_slot_1(key: str) -> None:
    assert (murmur3_32(key.encode()) & 0x7FFFFFFF) % 65_536 == 0
    assert key_slot(key) == 1


def test_the_ordering_key_routes_before_the_partition_key() -> None:
    assert routing_key("partition", "ordering") == "ordering"
    assert routing_key("partition", None) == "partition"
    assert routing_key("partition", "") == ""
    assert routing_key(None, None) is None


@pytest.mark.parametrize(
    ("key", "read"),
    [
        ("k\udcff", b"k\xff".decode(errors="replace")),
        ("\udcc3\udca4", "ä"),
        ("\ud800", "?"),
        ("\ud800\udcff", "??"),
        ("日本", "日本"),
    ],
)
def test_a_key_with_lone_surrogates_lies_where_the_broker_puts_its_bytes(
    key: str, read: str
) -> None:
    """A key of a command line that is not UTF-8 ended the process in the hash function."""
    assert broker_text(key) == read
    assert key_slot(key) == key_slot(read)
    assert possible_slots(key)[0] == key_slot(read)
