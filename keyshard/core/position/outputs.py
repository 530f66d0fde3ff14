"""The outputs of a run in its checkpoint: messages to publish, and messages already handled.

A batch of outputs is in the checkpoint before it is published. After a crash it is published again
under the same name, batch and order, and the broker drops the messages that it has stored. The
messages that the batch was made from are never handled again, even if other messages of their
entries are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.entry_runs import index_runs, parse_indices
from keyshard.core.publishing import BATCH_ID_MAX, HashingScheme
from keyshard.errors import CheckpointMismatchError


class TopicRows(NamedTuple):
    """The outputs of a batch for one topic."""

    partitions: int
    """Number of its topic partitions, over which the keys are distributed."""
    rows: str
    """The messages as text; only the publisher reads it."""
    scheme: HashingScheme
    """Hash by which the keys are distributed, even if the sink has another one after a restart."""


Handled = dict[TopicPartition, dict[EntryId, set[int]]]
"""Batch indices of handled messages of entries that are not delivered yet, by entry."""


def copied(handled: Mapping[TopicPartition, Mapping[EntryId, Collection[int]]]) -> Handled:
    """Return a copy that can be changed."""
    return {where: {at: set(rows) for at, rows in of.items()} for where, of in handled.items()}


def note(handled: Handled, done: Iterable[tuple[TopicPartition, EntryId, int]]) -> None:
    """Add handled messages: topic partition, entry and batch index."""
    for where, entry, index in done:
        handled.setdefault(where, {}).setdefault(entry, set()).add(index)


def forget(handled: Handled, entries: Mapping[TopicPartition, Iterable[EntryId]]) -> None:
    """Remove the messages of entries that a checkpoint has as delivered."""
    for where, ids in entries.items():
        of = handled.get(where, {})
        for entry in ids:
            of.pop(entry, None)
        if not of:
            handled.pop(where, None)


def handled_to_dict(
    handled: Mapping[TopicPartition, Mapping[EntryId, Collection[int]]],
) -> dict[str, dict[str, str]]:
    """Return the JSON object."""
    return {
        where.name: {f"{at.ledger}:{at.entry}": index_runs(rows) for at, rows in sorted(of.items())}
        for where, of in handled.items()
    }


def handled_from_dict(data: Mapping[str, Mapping[str, str]]) -> Handled:
    """Parse the form of :func:`handled_to_dict`.

    Raises:
        TypeError, ValueError, AttributeError: The object has another form.
    """
    return {
        TopicPartition.parse(name): {
            EntryId.parse(at): set(parse_indices(rows)) for at, rows in of.items()
        }
        for name, of in data.items()
    }


@dataclass(frozen=True, slots=True)
class Outputs:
    """The newest batch of outputs, and handled messages whose entries are not delivered."""

    sink_id: str
    run_id: str
    """Part of the producer name: each new checkpoint has its own."""
    batch_id: int = 0
    topics: Mapping[str, TopicRows] = field(default_factory=dict)
    """Outputs by full topic name; empty once they are confirmed."""
    handled: Mapping[TopicPartition, Mapping[EntryId, set[int]]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        handled = handled_to_dict(self.handled)
        topics = {topic: list(rows) for topic, rows in self.topics.items()}
        return {
            "batch": self.batch_id, "handled": handled, "run": self.run_id, "sink": self.sink_id,
            "topics": topics,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Outputs:
        """Parse the form of :meth:`to_dict`.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: The object has another form.
        """
        batch_id = data["batch"]
        if type(batch_id) is not int or not 0 <= batch_id <= BATCH_ID_MAX:
            raise ValueError(f"batch is {batch_id!r}")
        topics: dict[str, TopicRows] = {}
        for topic, (partitions, rows, scheme) in data["topics"].items():
            if type(partitions) is not int or partitions < 1 or type(rows) is not str:
                raise ValueError(f"the outputs for {topic} have another form")
            if scheme not in get_args(HashingScheme):
                raise ValueError(f"the outputs for {topic} have the hashing scheme {scheme!r}")
            topics[topic] = TopicRows(partitions, rows, scheme)
        handled = handled_from_dict(data["handled"])
        return cls(text_in(data, "sink"), text_in(data, "run"), batch_id, topics, handled)


def text_in(data: Mapping[str, Any], name: str) -> str:
    """Return a field that is text.

    Raises:
        KeyError, ValueError: It is missing, or no text.
    """
    text = data[name]
    if not isinstance(text, str):
        raise ValueError(f"{name} is {text!r}")
    return text


def check_owner(outputs: Outputs | None, sink_id: str | None) -> None:
    """Refuse a checkpoint with outputs of another sink: this start would lose them.

    Raises:
        CheckpointMismatchError: The checkpoint has outputs of another sink.
    """
    if outputs is not None and outputs.sink_id != sink_id:
        given = "without a sink" if sink_id is None else f"with sink_id {sink_id!r}"
        raise CheckpointMismatchError(
            f"The checkpoint has outputs of the sink with sink_id {outputs.sink_id!r}, but the "
            f"source starts {given}.",
            "Give that sink to source.run() or source.batches(), or use another checkpoint.",
        )
