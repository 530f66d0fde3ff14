"""Checkpoints: canonical JSON, and every refusal of an invalid one."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from keyshard.core.position.checkpoint import COMPACT_VERSION, Checkpoint, PartitionCheckpoint
from keyshard.core.position.entry import EntryId
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.position.outputs import Outputs
from keyshard.core.ring.assignment import Rescaled, assign, reassign
from keyshard.core.ring.hash_range import RING_SIZE, HashRange
from keyshard.errors import CheckpointError
from tests.helpers import P0, P1

FULL = Checkpoint(
    "standalone",
    "billing",
    10,
    {
        P1: PartitionCheckpoint(delivered=EntrySet.parse("9:0-3"), published_ms=5),
        P0: PartitionCheckpoint(
            floor=EntryId(7, 3),
            delivered=EntrySet.parse("7:4-79"),
            batch=EntrySet.parse("7:40-79"),
            partial={EntryId(7, 41): frozenset({2, 0, 1}), EntryId(7, 40): frozenset({1})},
            published_ms=1_700_000_000_000,
        ),
    },
)


def test_the_text_is_canonical_json_in_the_documented_form() -> None:
    assert FULL.to_json() == (
        '{"cluster":"standalone","partitions":{'
        '"persistent://public/default/t-partition-0":{"batch":"7:40-79","delivered":"7:4-79",'
        '"floor":"7:3","partial":{"7:40":"1","7:41":"0-2"},"published":1700000000000},'
        '"persistent://public/default/t-partition-1":{"delivered":"9:0-3","published":5}},'
        '"ranges":10,"subscription":"billing","version":1}'
    )


def test_the_dictionary_dumped_by_anybody_has_its_keys_in_canonical_order() -> None:
    assert json.dumps(FULL.to_dict(), separators=(",", ":")) == FULL.to_json()


def test_any_difference_gives_another_batch_id() -> None:
    state = FULL.partitions[P0]
    others = [
        Checkpoint("other", "billing", 10, FULL.partitions),
        Checkpoint("standalone", "other", 10, FULL.partitions),
        Checkpoint("standalone", "billing", 11, FULL.partitions),
        Checkpoint("standalone", "billing", 10, {P0: state}),
        Checkpoint("standalone", "billing", 10, {**FULL.partitions, P0: PartitionCheckpoint()}),
    ]
    assert len({FULL.batch_id, *(other.batch_id for other in others)}) == 6
    assert len(FULL.batch_id) == 16


def test_entries_at_or_below_the_floor_or_delivered_are_resolved() -> None:
    state = PartitionCheckpoint(floor=EntryId(7, 3), delivered=EntrySet.parse("7:5;8:1"))
    resolved = [(6, 99), (7, 3), (7, 5), (8, 1)]
    open_ = [(7, 4), (7, 6), (8, 0), (8, 2), (9, 0)]
    assert all(state.covers(EntryId(*pair)) for pair in resolved)
    assert not any(state.covers(EntryId(*pair)) for pair in open_)
    assert not PartitionCheckpoint().covers(EntryId(0, 0))


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    data = copy.deepcopy(FULL.to_dict())
    change(data)
    return data


def in_partition(name: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda data: data["partitions"][P0.name].update({name: value})


OUTPUTS = {"batch": 1, "handled": {}, "run": "0a", "sink": "s", "topics": {}}
REFUSED: dict[str, Callable[[dict[str, Any]], object]] = {
    "older version": lambda data: data.update(version=0),
    "newer version": lambda data: data.update(version=COMPACT_VERSION + 1),
    "version as text": lambda data: data.update(version="1"),
    "version as boolean": lambda data: data.update(version=True),
    "no version": lambda data: data.pop("version"),
    "no cluster": lambda data: data.pop("cluster"),
    "no subscription": lambda data: data.pop("subscription"),
    "no ranges": lambda data: data.pop("ranges"),
    "no partitions": lambda data: data.pop("partitions"),
    "ranges 0": lambda data: data.update(ranges=0),
    "ranges above the ring": lambda data: data.update(ranges=65_537),
    "ranges as text": lambda data: data.update(ranges="10"),
    "ranges as boolean": lambda data: data.update(ranges=True),
    "id a number": lambda data: data.update(subscription_id=3),
    "without id a text": lambda data: data.update(subscription_id="a", without_id=P0.name),
    "without id a number": lambda data: data.update(subscription_id="a", without_id=[3]),
    "ranges null": lambda data: data.update(ranges=None),
    "partitions a list": lambda data: data.update(partitions=[]),
    "partition a number": lambda data: data["partitions"].update({P0.name: 3}),
    "no delivered": lambda data: data["partitions"][P0.name].pop("delivered"),
    "no published": lambda data: data["partitions"][P0.name].pop("published"),
    "unknown field": in_partition("extra", 1),
    "bad run": in_partition("delivered", "7:79-40"),
    "delivered null": in_partition("delivered", None),
    "delivered a number": in_partition("delivered", 7),
    "delivered not canonical": in_partition("delivered", "7:4-78,79"),
    "bad run in batch": in_partition("batch", "7:x"),
    "batch not within delivered": in_partition("batch", "7:40-80"),
    "batch at another ledger": in_partition("batch", "8:0"),
    "partial not within batch": in_partition("partial", {"7:39": "0"}),
    "partial without indices": in_partition("partial", {"7:40": ""}),
    "partial indices not canonical": in_partition("partial", {"7:40": "00"}),
    "partial a list": in_partition("partial", ["7:40"]),
    "partial id not canonical": in_partition("partial", {"7:040": "1"}),
    "floor without entry": in_partition("floor", "7"),
    "floor negative": in_partition("floor", "7:-1"),
    "floor not canonical": in_partition("floor", "07:3"),
    "floor a number": in_partition("floor", 7),
    "published as text": in_partition("published", "5"),
    "published as boolean": in_partition("published", value=True),
    "published a fraction": in_partition("published", 5.5),
    "published negative": in_partition("published", -1),
    "delivered no entry of a ledger": in_partition("delivered", f"7:4-{2**63}"),
    "delivered no ledger": in_partition("delivered", f"7:4-79;{2**63}:0"),
    "floor no entry of a ledger": in_partition("floor", f"7:{2**63}"),
    "floor no ledger": in_partition("floor", f"{2**63}:3"),
    "cluster null": lambda data: data.update(cluster=None),
    "cluster a number": lambda data: data.update(cluster=3),
    "subscription null": lambda data: data.update(subscription=None),
    "subscription a list": lambda data: data.update(subscription=["billing"]),
    "merged null": lambda data: data.update(merged=None),
    "parked null": lambda data: data.update(parked=None),
    "id null": lambda data: data.update(subscription_id=None),
    "without id, and no id": lambda data: data.update(without_id=[P0.name]),
    "outputs in version 1": lambda data: data.update(outputs=OUTPUTS),
    "sink of outputs null": lambda data: data.update(version=2, outputs=OUTPUTS | {"sink": None}),
    "run of outputs null": lambda data: data.update(version=2, outputs=OUTPUTS | {"run": None}),
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_an_invalid_checkpoint_is_refused_with_a_sentence(
    change: Callable[[dict[str, Any]], object],
) -> None:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.from_json(json.dumps(changed(change)))
    assert caught.value.message[0].isupper() or caught.value.message[0] == "'"
    assert caught.value.message.endswith(".")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "The checkpoint is not JSON"),
        ("{", "The checkpoint is not JSON"),
        ("[]", "The checkpoint is list, not a JSON object."),
        ("null", "The checkpoint is NoneType, not a JSON object."),
        (
            "{}",
            "The checkpoint has version None, but this release of keyshard reads versions 1 to 3.",
        ),
        ('{"version":1}', "Field 'ranges' is missing in the checkpoint."),
    ],
)
def test_other_texts_are_refused_by_their_kind(text: str, sentence: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.from_json(text)
    assert caught.value.message.startswith(sentence)


def test_a_refusal_inside_a_partition_names_it() -> None:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.from_dict(changed(in_partition("batch", "7:40-80")))
    assert caught.value.message == (
        f"Cannot read {P0.name}: its batch is not within delivered. "
        "Restore the checkpoint, or start with a new one."
    )


@pytest.mark.parametrize(
    ("field", "twice"),
    [
        ('"ranges":10', '"ranges":10,"ranges":5'),
        ('"floor":"7:3"', '"floor":"7:3","floor":"7:9"'),
        (f'"{P1.name}":', f'"{P0.name}":'),
    ],
)
def test_a_field_that_is_there_twice_is_refused(field: str, twice: str) -> None:
    """The last one counted, and the other was ignored."""
    text = FULL.to_json()
    assert text.count(field) == 1
    with pytest.raises(CheckpointError, match="is there twice"):
        Checkpoint.from_json(text.replace(field, twice))


@pytest.mark.parametrize("version", [2, COMPACT_VERSION])
def test_the_versions_with_outputs_read_them(version: int) -> None:
    read = Checkpoint.from_dict(FULL.to_dict() | {"version": version, "outputs": OUTPUTS})
    assert read.outputs == Outputs("s", "0a", 1)


QUARTERS = "0-9,32768-65535;10-32767"


@pytest.mark.parametrize(
    ("owners", "text"), [(assign(8), "8"), (reassign(assign(1), 2), "2"), (None, f'"{QUARTERS}"')]
)
def test_the_checkpoint_after_a_restart_is_compact(owners: Any, text: str) -> None:
    if owners is None:
        owners = (
            (HashRange(0, 9), HashRange(32_768, RING_SIZE - 1)), (HashRange(10, 32_767),),
        )  # fmt: skip
    rescaled = replace(FULL, rescaled=Rescaled(4, owners))
    assert f'"ranges":10,"rescaled":{{"owners":{text},"parallelism":4}},"sub' in rescaled.to_json()
    assert Checkpoint.from_json(rescaled.to_json()) == rescaled
    assert json.dumps(rescaled.to_dict(), separators=(",", ":")) == rescaled.to_json()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (None, "not an object"),
        (8, "not an object"),
        ({"owners": 8}, "not an object"),
        ({"owners": 8, "parallelism": 4, "more": 1}, "not an object"),
        ({"owners": 8, "parallelism": "4"}, "parallelism"),
        ({"owners": 8, "parallelism": 0}, "parallelism"),
        ({"owners": True, "parallelism": 4}, "its owners are True"),
        ({"owners": 0, "parallelism": 4}, "its owners are 0"),
        ({"owners": 65_537, "parallelism": 4}, "its owners are 65537"),
        ({"owners": "", "parallelism": 4}, "not a range"),
        ({"owners": "0-65535;", "parallelism": 4}, "not a range"),
        ({"owners": "0-65536", "parallelism": 4}, "not a range"),
        ({"owners": "0-" + "9" * 5_000, "parallelism": 4}, "not a range"),
        ({"owners": "9-0;10-65535", "parallelism": 4}, "not a range"),
        ({"owners": "0-\u0663;4-65535", "parallelism": 4}, "not a range"),
        ({"owners": "0-\u00b2;4-65535", "parallelism": 4}, "not a range"),
        ({"owners": "00-65535", "parallelism": 4}, "not in the form"),
        ({"owners": "5-65535,0-4", "parallelism": 4}, "not in the form"),
        ({"owners": "0-9,10-65535", "parallelism": 4}, "not in the form"),
        ({"owners": "0-9;11-65535", "parallelism": 4}, "once: 10 has none"),
        ({"owners": "0-9;9-65535", "parallelism": 4}, "once: 9 has two"),
        ({"owners": "0-9;10-65534", "parallelism": 4}, "once: 65535 has none"),
        ({"owners": "1-65535", "parallelism": 4}, "once: 0 has none"),
    ],
)
def test_a_damaged_assignment_is_refused(wrong: object, says: str) -> None:
    with pytest.raises(CheckpointError, match=says) as caught:
        Checkpoint.from_dict(FULL.to_dict() | {"rescaled": wrong})
    assert len(caught.value.message) < 300
