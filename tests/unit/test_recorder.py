"""What a recorder makes of the messages and batches it sees."""

from __future__ import annotations

import pytest

from helpers import P0, block
from keyshard.core.checkpoint import Checkpoint
from keyshard.core.hash_range import RING_SIZE
from keyshard.core.key_slot import key_slot
from keyshard.core.layout import lay_out
from keyshard.verify.recorder import part_range
from keyshard.verify.recording_broker import message_name


def test_messages_of_a_workload_are_named_by_key_and_number() -> None:
    assert message_name(b"k12:345:xxx", "k12") == ("k12", 345)
    assert message_name(b"k12:345:xxx", "an ordering key") == ("k12", 345)


def test_other_messages_are_named_by_their_position() -> None:
    assert message_name(b"{}", "customer") == ("customer", None)
    assert message_name(b"k12:345:xxx", None) == (None, None)


@pytest.mark.parametrize(("ranges", "merged"), [(1, None), (10, None), (10, 3), (7, 7), (16, 1)])
def test_a_key_lies_in_the_range_of_its_part(ranges: int, merged: int | None) -> None:
    end = Checkpoint("", "s", ranges, merged=merged)
    parts = [part_range(end, part) for part in range(merged or ranges)]
    assert sum(map(len, parts)) == RING_SIZE
    blocks = [block(1, i, f"key-{i}") for i in range(200)]
    for part, located in lay_out({P0: blocks}, ranges, merged).items():
        for _, one in located:
            assert key_slot(one.partition_keys[0] or "") in parts[part]
