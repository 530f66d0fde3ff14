"""Outputs in a checkpoint, and messages as bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from keyshard.columns.outgoing import Outgoing, OutgoingMessage, outgoing_of
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.outputs import Outputs, TopicRows
from keyshard.errors import CheckpointError

WHERE = TopicPartition("persistent://public/default/orders", 2)
OUTPUTS = Outputs(
    "billing", "1f", 7, {"persistent://public/default/out": TopicRows(3, "AAAA", "murmur3")},
    {WHERE: {EntryId(5, 3): {0, 1, 2, 9}, EntryId(5, 1): {4}}},
)  # fmt: skip


def test_a_checkpoint_with_outputs_reads_back_and_has_another_version() -> None:
    given = Checkpoint("", "s", 4, outputs=OUTPUTS)
    text = given.to_json()
    assert json.loads(text)["version"] == 2
    assert json.loads(text)["outputs"]["handled"] == {WHERE.name: {"5:1": "4", "5:3": "0-2,9"}}
    assert Checkpoint.from_json(text) == given
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    assert json.loads(Checkpoint("", "s", 4).to_json())["version"] == 1


@pytest.mark.parametrize(
    "break_it",
    [
        lambda outputs: outputs.clear(),
        lambda outputs: outputs.update(batch=-1),
        lambda outputs: outputs.update(batch=2**31),
        lambda outputs: outputs.update(batch=True),
        lambda outputs: outputs.update(topics=[]),
        lambda outputs: outputs.update(topics={"t": [0, "AAAA", "java"]}),
        lambda outputs: outputs.update(topics={"t": [1, 5, "java"]}),
        lambda outputs: outputs.update(topics={"t": [1, "AAAA"]}),
        lambda outputs: outputs.update(topics={"t": [1, "AAAA", "crc"]}),
        lambda outputs: outputs.update(topics={"t": [1, "AAAA", []]}),
        lambda outputs: outputs.update(handled={"t": {"1:x": "0"}}),
        lambda outputs: outputs.update(handled={"t": {"1:1": "2-1"}}),
        lambda outputs: outputs.update(handled={"t": 5}),
    ],
)
def test_damaged_outputs_are_a_named_error(break_it: Callable[[dict[str, Any]], object]) -> None:
    data = Checkpoint("", "s", 4, outputs=OUTPUTS).to_dict()
    break_it(data["outputs"])
    with pytest.raises(CheckpointError):
        Checkpoint.from_dict(data)


MESSAGES = [
    OutgoingMessage(b"a", "k", None, {"x": "1", "y": ""}, 1_700_000_000_000, None),
    OutgoingMessage(None, None, "o", None, None, 1_800_000_000_000),
    OutgoingMessage(b"", "", "", {}, None, None),
    OutgoingMessage("ä€".encode(), "ä€", None, None, 1, None),
]


@pytest.mark.parametrize("messages", [MESSAGES, MESSAGES[:1], MESSAGES[1:2], MESSAGES[3:]])
def test_messages_as_bytes_are_the_same_messages(messages: list[OutgoingMessage]) -> None:
    found = Outgoing.from_bytes(Outgoing.of(messages).to_bytes())
    expected = [one._replace(properties=one.properties or None) for one in messages]
    assert found.messages(0, len(found)) == expected


def test_keys_of_bytes_stay_keys_of_bytes() -> None:
    rows = outgoing_of(pa.record_batch({"value": [b"x"], "__keyBytes": [b"\xff\0"]}))
    found = Outgoing.from_bytes(rows.to_bytes())
    assert found.messages(0, 1) == rows.messages(0, 1)
    assert found.messages(0, 1)[0].key_is_base64


def test_joined_parts_have_all_columns_of_any() -> None:
    parts = [Outgoing.of(MESSAGES[:1]), Outgoing.of(MESSAGES[1:2]), Outgoing.of(MESSAGES[2:])]
    joined = Outgoing.joined(parts)
    assert joined.messages(0, 4) == Outgoing.of(MESSAGES).messages(0, 4)


@pytest.mark.parametrize("data", [b"", b"nonsense", Outgoing.of(MESSAGES).to_bytes()[:60]])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises((ValueError, OSError)):
        Outgoing.from_bytes(data)


def test_bytes_without_their_end_are_refused() -> None:
    data = Outgoing.of(MESSAGES).to_bytes()
    second = data.index(b"\xff\xff\xff\xff", 8)  # behind the schema
    with pytest.raises(ValueError, match="no messages"):
        Outgoing.from_bytes(data[:second])
