"""Checkpoints round-trip, and equal ones have equal texts."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyshard.core.position.checkpoint import Checkpoint, PartitionCheckpoint, SubscriptionId
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.ring.assignment import Rescaled, assign
from keyshard.errors import CheckpointError

BOUNDED = settings(max_examples=40, deadline=None)

ids = st.builds(EntryId, st.integers(0, 3), st.integers(0, 20))
indices = st.frozensets(st.integers(0, 9), min_size=1)
topic_partitions = st.builds(
    TopicPartition,
    st.sampled_from(["persistent://a/b/c", "persistent://a/b/\u65e5", 'persistent://a/b/"q"']),
    st.integers(-1, 12),
)


@st.composite
def partition_checkpoints(draw: st.DrawFn) -> PartitionCheckpoint:
    delivered = draw(st.frozensets(ids, max_size=20))
    batch = draw(st.frozensets(st.sampled_from(sorted(delivered)))) if delivered else frozenset()
    partial = draw(st.dictionaries(st.sampled_from(sorted(batch)), indices)) if batch else {}
    return PartitionCheckpoint(
        floor=draw(st.none() | ids),
        delivered=EntrySet.of(delivered),
        batch=EntrySet.of(batch),
        partial=partial,
        published_ms=draw(st.integers(0, 2**53)),
    )


@st.composite
def any_checkpoint(draw: st.DrawFn) -> Checkpoint:
    ranges = draw(st.integers(1, 65_536))
    return Checkpoint(
        cluster=draw(st.text(max_size=5)),
        subscription=draw(st.text(min_size=1, max_size=5)),
        ranges=ranges,
        partitions=draw(st.dictionaries(topic_partitions, partition_checkpoints(), max_size=3)),
        merged=draw(st.none() | st.integers(1, ranges - 1)) if ranges > 1 else None,
        rescaled=draw(
            st.none() | st.builds(Rescaled, st.integers(1, 65_536), st.integers(1, 20).map(assign))
        ),
        subscription_id=draw(
            st.none()
            | st.builds(
                SubscriptionId, st.text(max_size=5), st.frozensets(topic_partitions, max_size=3)
            )
        ),
        handled=draw(
            st.dictionaries(
                topic_partitions, st.dictionaries(ids, indices, min_size=1, max_size=3), max_size=2
            )
        ),
    )


checkpoints = any_checkpoint()


@BOUNDED
@given(partition_checkpoints())
def test_the_size_of_a_part_is_known_without_its_text(state: PartitionCheckpoint) -> None:
    assert state.json_bytes == len(state.to_json()) == state.json_bytes


@BOUNDED
@given(checkpoints)
def test_text_and_dictionary_round_trip(checkpoint: Checkpoint) -> None:
    assert Checkpoint.from_json(checkpoint.to_json()) == checkpoint
    assert Checkpoint.from_dict(checkpoint.to_dict()) == checkpoint


@BOUNDED
@given(checkpoints, st.randoms())
def test_equal_checkpoints_have_equal_texts(checkpoint: Checkpoint, random: object) -> None:
    turned = Checkpoint(
        checkpoint.cluster,
        checkpoint.subscription,
        checkpoint.ranges,
        dict(reversed([*checkpoint.partitions.items()])),
        checkpoint.merged,
        rescaled=checkpoint.rescaled,
        subscription_id=checkpoint.subscription_id,
        handled=dict(reversed([*checkpoint.handled.items()])),
    )
    assert turned.to_json() == checkpoint.to_json()
    resaved = Checkpoint.from_json(json.dumps(json.loads(checkpoint.to_json()), indent=2))
    assert resaved.to_json() == checkpoint.to_json()


@BOUNDED
@given(checkpoints)
def test_the_text_is_that_of_any_json_writer_with_sorted_keys_and_no_spaces(
    checkpoint: Checkpoint,
) -> None:
    data = json.loads(checkpoint.to_json())
    assert data == checkpoint.to_dict()
    assert json.dumps(data, sort_keys=True, separators=(",", ":")) == checkpoint.to_json()


@BOUNDED
@given(st.text(max_size=20) | st.text(alphabet='{}[]":,01', max_size=20))
def test_any_text_is_a_checkpoint_or_a_checkpoint_error(text: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.from_json(text)
    assert caught.value.message.endswith(".")


@BOUNDED
@given(checkpoints, checkpoints)
def test_unequal_checkpoints_have_unequal_texts(left: Checkpoint, right: Checkpoint) -> None:
    assert (left == right) == (left.to_json() == right.to_json())
    assert (left == right) == (left.batch_id == right.batch_id)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.floats(allow_nan=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
STATE_FIELDS = ("batch", "delivered", "floor", "partial", "published")
PATHS = [
    ("rescaled",), ("rescaled", "owners"), ("rescaled", "parallelism"),
    ("handled",), ("handled", "t"), ("handled", "t", "1:9"),
    ("version",), ("ranges",), ("merged",), ("partitions",), ("partitions", "t"),
    *(("partitions", "t", name) for name in STATE_FIELDS),
]  # fmt: skip


@BOUNDED
@given(st.sampled_from(PATHS), json_values)
def test_any_wrong_value_anywhere_is_a_checkpoint_error(
    path: tuple[str, ...], value: object
) -> None:
    data = {
        "version": 1, "cluster": "c", "subscription": "s", "ranges": 3,
        "rescaled": {"owners": "0-9;10-65535", "parallelism": 4}, "handled": {"t": {"1:9": "0-3"}},
        "partitions": {"t": {
            "delivered": "1:0-5", "batch": "1:3-5", "floor": "0:9", "partial": {"1:3": "0"},
            "published": 5,
        }},
    }  # fmt: skip
    at = data
    for name in path[:-1]:
        at = at[name]  # type: ignore[assignment]
    at[path[-1]] = value  # type: ignore[assignment]
    try:
        found = Checkpoint.from_dict(data)
    except CheckpointError as exc:
        assert exc.message.endswith(".")  # noqa: PT017 - other values are valid
    else:
        assert Checkpoint.from_json(found.to_json()) == found
