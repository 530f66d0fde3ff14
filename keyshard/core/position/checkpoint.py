"""The checkpoint: the state that a host engine stores, and that decides which entries come next.

Canonical JSON, because Spark compares offsets as strings::

    {"cluster": "standalone", "partitions": {"persistent://public/default/orders-partition-0":
      {"batch": "7:40-79", "delivered": "7:0-79", "published": 1700000000000}},
     "ranges": 10, "subscription": "billing", "version": 1}

``batch`` names the entries of this micro-batch explicitly. It is never computed as a difference of
two checkpoints, because ``floor`` and ``delivered`` are pruned. Checkpoints of handlers may also
contain the ``parked`` keys, the fact that ranges were ``rescaled``, and the messages that were
``handled`` of entries that are not delivered yet.

The version is the lowest that can hold the checkpoint, so that older releases refuse checkpoints
that they cannot read. Version 2 has ``outputs``: a release that ignored them would lose them.
Version 3 has a compact entry set (:mod:`keyshard.core.position.ledger_entries`), and may have
``outputs``.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from json.encoder import encode_basestring_ascii
from typing import Any

from keyshard.base_error import one_line
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.entry_runs import index_runs, parse_indices
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.position.outputs import (
    Outputs,
    handled_from_dict,
    handled_to_dict,
    text_in,
)
from keyshard.core.ring.assignment import Rescaled
from keyshard.core.ring.hash_range import RING_SIZE
from keyshard.errors import CheckpointError
from keyshard.notebook import table
from keyshard.redaction import shown

VERSION, OUTPUTS_VERSION, COMPACT_VERSION = 1, 2, 3
"""Versions of the JSON form: plain, with outputs, and with a compact entry set."""
VERSIONS = (VERSION, OUTPUTS_VERSION, COMPACT_VERSION)
FEW_RUNS = 8
"""Runs of a topic partition up to which its text costs no more than its length."""


@dataclass(frozen=True, slots=True)
class PartitionCheckpoint:
    """Delivered and resolved entries, and the entries of the batch, for one topic partition."""

    floor: EntryId | None = None
    """Every entry up to this position is delivered or resolved; ``None`` if none is known to be."""
    delivered: EntrySet = field(default_factory=EntrySet)
    """Entries above the floor that are in a committed or planned batch."""
    batch: EntrySet = field(default_factory=EntrySet)
    """Entries of this batch; a subset of ``delivered``."""
    partial: Mapping[EntryId, frozenset[int]] = field(default_factory=dict)
    """Delivered indices of those entries in ``batch`` that were delivered in part."""
    published_ms: int = 0
    """Highest publish time delivered, milliseconds since the epoch."""
    _text: str = field(default="", init=False, repr=False, compare=False)
    """Cached JSON text: most of a checkpoint is the same as in the previous one."""

    def covers(self, entry_id: EntryId) -> bool:
        """Return whether an entry is at or below the floor, or delivered."""
        if self.floor is not None and entry_id <= self.floor:
            return True
        return entry_id in self.delivered

    @property
    def is_compact(self) -> bool:
        """Whether an entry set has its compact text."""
        return self.delivered.is_compact or self.batch.is_compact

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object without empty fields."""
        result: dict[str, Any] = {"delivered": str(self.delivered), "published": self.published_ms}
        if self.batch:
            result["batch"] = str(self.batch)
        if self.floor is not None:
            result["floor"] = f"{self.floor.ledger}:{self.floor.entry}"
        if self.partial:
            result["partial"] = self._partial()
        return dict(sorted(result.items()))

    def to_json(self) -> str:
        """Return the canonical text of :meth:`to_dict`."""
        if not self._text:
            # Written directly: an encoder takes several times as long, for each cut.
            delivered = str(self.delivered)
            batch = delivered if self.batch is self.delivered else str(self.batch)
            floor, partial = self._rest()
            text = (
                f'{{{batch and _IN_BATCH % batch}"delivered":"{delivered}"{floor}{partial}'
                f',"published":{self.published_ms}}}'
            )
            object.__setattr__(self, "_text", text)
        return self._text

    @property
    def json_bytes(self) -> int:
        """Length of the text of :meth:`to_json`. With many runs, the text costs much more."""
        if self._text or self.delivered.run_count <= FEW_RUNS:
            return len(self.to_json())
        batch = len(_IN_BATCH % "") + self.batch.text_bytes if self.batch else 0
        floor, partial = self._rest()
        rest = _STATE_BYTES + len(str(self.published_ms)) + len(floor) + len(partial)
        return rest + self.delivered.text_bytes + batch

    def _rest(self) -> tuple[str, str]:
        """Return the text of the floor and of partial entries, empty without them."""
        at = self.floor
        floor = "" if at is None else f',"floor":"{at.ledger}:{at.entry}"'
        return floor, f',"partial":{_canonical(self._partial())}' if self.partial else ""

    def _partial(self) -> dict[str, str]:
        return {
            f"{ledger}:{entry}": index_runs(indices)
            for (ledger, entry), indices in sorted(self.partial.items())
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PartitionCheckpoint:
        """Parse the form of :meth:`to_dict`.

        Raises:
            KeyError, TypeError, ValueError: The object has another form.
        """
        unknown = data.keys() - {"batch", "delivered", "floor", "partial", "published"}
        if unknown:
            raise ValueError(f"unknown field {min(unknown)!r}")
        published = data["published"]
        if type(published) is not int or published < 0:
            raise ValueError(f"published is {published!r}, not a time")
        result = cls(
            floor=EntryId.parse(data["floor"]) if "floor" in data else None,
            delivered=EntrySet.parse(data["delivered"]),
            batch=EntrySet.parse(data.get("batch", "")),
            partial={
                EntryId.parse(name): parse_indices(indices)
                for name, indices in data.get("partial", {}).items()
            },
            published_ms=published,
        )
        if not result.batch <= result.delivered:
            raise ValueError("its batch is not within delivered")
        if any(entry_id not in result.batch for entry_id in result.partial):
            raise ValueError("its partial entries are not within its batch")
        return result


_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
_IN_BATCH = '"batch":"%s",'
_STATE_BYTES = len('{"delivered":"","published":}')
_NAMES_KEPT = 20_000
"""Size of the cache of names. Each checkpoint has the names of all topic partitions."""


@lru_cache(_NAMES_KEPT)
def named(topic_partition: TopicPartition) -> tuple[str, str]:
    """Return the name of a topic partition, and the same as a JSON key with its colon."""
    name = topic_partition.name
    return name, f"{encode_basestring_ascii(name)}:"


def partition_texts(
    states: Mapping[TopicPartition, PartitionCheckpoint],
) -> dict[TopicPartition, str]:
    """Return the canonical text of each topic partition, in the order of a checkpoint's text."""
    ordered = sorted(states, key=lambda one: named(one)[0])
    return {one: named(one)[1] + states[one].to_json() for one in ordered}


class WrittenStates(dict[TopicPartition, PartitionCheckpoint]):
    """States of topic partitions with their text, so that each checkpoint writes only new states.

    Args:
        states: The states.
        text: :func:`partition_texts` of them, joined.
        compact: Whether one of them is compact.
    """

    __slots__ = ("compact", "text")

    def __init__(
        self, states: Mapping[TopicPartition, PartitionCheckpoint], text: str, *, compact: bool
    ) -> None:
        super().__init__(states)
        self.text = text
        self.compact = compact


@dataclass(frozen=True, slots=True)
class SubscriptionId:
    """Property ``keyshard.id`` of the subscription in the topic partitions of a checkpoint."""

    text: str
    without: frozenset[TopicPartition] = frozenset()
    """Topic partitions whose subscription may lack it."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of a checkpoint. Older releases ignore them."""
        without = sorted(one.name for one in self.without)
        return {"subscription_id": self.text} | ({"without_id": without} if without else {})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SubscriptionId | None:
        """Parse the fields of a checkpoint; ``None`` without an id.

        Raises:
            KeyError, TypeError, ValueError: They have another form.
        """
        names = data.get("without_id", [])
        if "subscription_id" not in data and not names:
            return None
        text = text_in(data, "subscription_id")
        if type(names) is not list or not all(isinstance(name, str) for name in names):
            raise ValueError(f"without_id is {names!r}")
        return cls(text, frozenset(map(TopicPartition.parse, names)))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A durable point of one subscription, over all its topic partitions."""

    cluster: str
    """Name of the Pulsar cluster; empty without ``admin_url``."""
    subscription: str
    ranges: int
    """Number of hash ranges in the layout of this batch."""
    partitions: Mapping[TopicPartition, PartitionCheckpoint] = field(default_factory=dict)
    merged: int | None = None
    """Number of layout partitions when ranges share them; ``None``: one per range."""
    parked: Mapping[str, Any] | None = None
    """Parked keys, as :meth:`keyshard.dead_letters.topic_state.TopicState.to_dict` writes them;
    ``None``: only the dead-letter topic knows them."""
    rescaled: Rescaled | None = None
    """Ranges with which a restart begins, instead of ``parallelism`` equal ones. Only handlers
    and ``batches()`` write it. ``None``: begin with ``parallelism``."""
    outputs: Outputs | None = None
    """Outputs of the run; ``None`` without a sink."""
    subscription_id: SubscriptionId | None = None
    """Distinguishes the subscription from another one of the same name (ADR 44); ``None``: it has
    no id."""
    handled: Mapping[TopicPartition, Mapping[EntryId, Collection[int]]] = field(
        default_factory=dict
    )
    """Batch indices of handled messages of entries of several keys that are not delivered; with a
    sink, ``outputs`` has them. Without them, a restart would repeat a message after newer ones of
    its key."""
    _batch_id: list[str] = field(default_factory=list, init=False, repr=False, compare=False)

    def _repr_html_(self) -> str:
        states = sorted(self.partitions.items(), key=lambda one: one[0].name)
        return table(
            f"Checkpoint {self.batch_id} of {self.subscription}, {self.ranges} ranges",
            (
                (
                    where.name,
                    None if one.floor is None else f"{one.floor.ledger}:{one.floor.entry}",
                    len(one.delivered),
                    one.delivered.run_count,
                    len(one.batch),
                )
                for where, one in states
            ),
            ("topic partition", "floor", "delivered entries above", "runs", "entries of the batch"),
        )

    @property
    def batch_id(self) -> str:
        """Name of the batch that ends here. Spark passes no batch id to a source."""
        if not self._batch_id:
            self._batch_id.append(hashlib.sha256(self.to_json().encode()).hexdigest()[:16])
        return self._batch_id[0]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object, keys in canonical order."""
        before, after = self._around()
        ordered = sorted(self.partitions, key=lambda one: one.name)
        partitions = {one.name: self.partitions[one].to_dict() for one in ordered}
        return before | {"partitions": partitions} | after

    def to_json(self) -> str:
        """Return the canonical text: equal checkpoints have equal texts."""
        before, after = map(_canonical, self._around())
        states = self.partitions
        partitions = (
            states.text
            if isinstance(states, WrittenStates)
            else ",".join(partition_texts(states).values())
        )
        return f'{before[:-1]},"partitions":{{{partitions}}},{after[1:]}'

    def _around(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the fields before and after ``partitions``, in canonical order."""
        merged = {} if self.merged is None else {"merged": self.merged}
        outputs = {} if self.outputs is None else {"outputs": self.outputs.to_dict()}
        parked = {} if self.parked is None else {"parked": dict(self.parked)}
        rescaled = {} if self.rescaled is None else {"rescaled": self.rescaled.to_dict()}
        subscription = {"subscription": self.subscription, "version": self._version}
        if self.subscription_id is not None:
            subscription |= self.subscription_id.to_dict()
        handled = {"handled": handled_to_dict(self.handled)} if self.handled else {}
        before = {"cluster": self.cluster, **handled, **merged, **outputs, **parked}
        after = {"ranges": self.ranges, **rescaled, **subscription}
        return before, dict(sorted(after.items()))

    @property
    def _version(self) -> int:
        states = self.partitions
        if (
            states.compact
            if isinstance(states, WrittenStates)
            else any(state.is_compact for state in states.values())
        ):
            return COMPACT_VERSION
        return VERSION if self.outputs is None else OUTPUTS_VERSION

    @classmethod
    def from_json(cls, text: str) -> Checkpoint:
        """Parse the text of :meth:`to_json`.

        Raises:
            CheckpointError: The text is not JSON, or not a checkpoint of this version.
        """
        if not isinstance(text, str):
            raise CheckpointError(
                f"The checkpoint is {shown(text)}.", "Use the stored text, or None."
            )
        try:
            data = json.loads(text, object_pairs_hook=_fields)
        except ValueError as exc:
            raise CheckpointError(
                f"The checkpoint is not JSON: {exc}.", "Restore it, or start with a new checkpoint."
            ) from exc
        except RecursionError:
            raise CheckpointError(
                "The checkpoint cannot be read: it is nested too deeply.",
                "Restore it, or start with a new checkpoint.",
            ) from None
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Checkpoint:
        """Parse the form of :meth:`to_dict`.

        Raises:
            CheckpointError: A field is missing or wrong, or the version differs.
        """
        if not isinstance(data, Mapping):
            raise CheckpointError(
                f"The checkpoint is {type(data).__name__}, not a JSON object.",
                "Restore it, or start with a new checkpoint.",
            )
        version = data.get("version")
        if type(version) is not int or version not in VERSIONS:
            raise CheckpointError(
                f"The checkpoint has version {version!r}, but this release of keyshard reads "
                f"versions {VERSION} to {COMPACT_VERSION}.",
                "Use the release that wrote it.",
            )
        name = "the checkpoint"
        try:
            ranges = data["ranges"]
            if type(ranges) is not int or not 1 <= ranges <= RING_SIZE:
                raise ValueError(f"ranges is {ranges!r}")
            merged = data.get("merged")
            if "merged" in data and (type(merged) is not int or not 1 <= merged < ranges):
                raise ValueError(f"merged is {merged!r}")
            parked = data.get("parked")
            if "parked" in data and not isinstance(parked, Mapping):
                raise ValueError(f"parked is {parked!r}")
            rescaled = Rescaled.from_dict(data["rescaled"]) if "rescaled" in data else None
            has_outputs = version == OUTPUTS_VERSION or (
                version == COMPACT_VERSION and "outputs" in data
            )
            if "outputs" in data and not has_outputs:
                raise ValueError(f"version {version} has no outputs")
            outputs = Outputs.from_dict(data["outputs"]) if has_outputs else None
            subscription_id = SubscriptionId.from_dict(data)
            handled = handled_from_dict(data.get("handled", {}))
            cluster, subscription = text_in(data, "cluster"), text_in(data, "subscription")
            partitions: dict[TopicPartition, PartitionCheckpoint] = {}
            for name, state in data["partitions"].items():
                partitions[TopicPartition.parse(name)] = PartitionCheckpoint.from_dict(state)
        except CheckpointError:
            raise
        except KeyError as exc:
            raise CheckpointError(
                f"Field {exc} is missing in {name}.",
                "Restore the checkpoint, or start with a new one.",
            ) from exc
        except (ValueError, TypeError, AttributeError) as exc:
            raise CheckpointError(
                f"Cannot read {name}: {one_line(exc)}.",
                "Restore the checkpoint, or start with a new one.",
            ) from exc
        return cls(
            cluster, subscription, ranges, partitions, merged, parked, rescaled, outputs,
            subscription_id, handled,
        )  # fmt: skip


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields of a JSON object; the parser would keep the last of two with one name."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"field {twice!r} is there twice")
    return fields
