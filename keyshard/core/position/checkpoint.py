"""The checkpoint: what a host engine stores, and all that decides which entries come next.

Canonical JSON, because Spark compares offsets as strings::

    {"cluster": "standalone", "partitions": {"persistent://public/default/orders-partition-0":
      {"batch": "7:40-79", "delivered": "7:0-79", "published": 1700000000000}},
     "ranges": 10, "subscription": "billing", "version": 1}

``batch`` names the entries of this micro-batch explicitly. It is never computed as a difference of
two checkpoints, because ``floor`` and ``delivered`` are pruned. Checkpoints of handlers may also
say which keys are ``parked``, and that their ranges were ``rescaled``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from json.encoder import encode_basestring_ascii
from typing import Any

from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet, index_runs, parse_indices
from keyshard.core.ring.assignment import Rescaled
from keyshard.core.ring.hash_range import RING_SIZE
from keyshard.errors import CheckpointError
from keyshard.redaction import shown

VERSION = 1
"""Version of the JSON form."""


@dataclass(frozen=True, slots=True)
class PartitionCheckpoint:
    """What is settled and what is in the batch, for one topic partition."""

    floor: EntryId | None = None
    """Everything at or below it is settled; ``None`` when nothing is known to be."""
    delivered: EntrySet = field(default_factory=EntrySet)
    """Entries above the floor that are in a committed or planned batch."""
    batch: EntrySet = field(default_factory=EntrySet)
    """Entries of this batch; a subset of ``delivered``."""
    partial: Mapping[EntryId, frozenset[int]] = field(default_factory=dict)
    """Of entries in ``batch`` that were delivered in part: the indices that were."""
    published_ms: int = 0
    """Highest publish time delivered, milliseconds since the epoch."""
    _text: list[str] = field(default_factory=list, init=False, repr=False, compare=False)
    """Its JSON text, once somebody asked: most of a checkpoint is as in the one before."""

    def settled(self, entry_id: EntryId) -> bool:
        """Whether an entry is at or below the floor, or delivered."""
        if self.floor is not None and entry_id <= self.floor:
            return True
        return entry_id in self.delivered

    def to_dict(self) -> dict[str, Any]:
        """The JSON object; fields that are empty are left out."""
        result: dict[str, Any] = {"delivered": str(self.delivered), "published": self.published_ms}
        if self.batch:
            result["batch"] = str(self.batch)
        if self.floor is not None:
            result["floor"] = f"{self.floor.ledger}:{self.floor.entry}"
        if self.partial:
            result["partial"] = self._partial()
        return dict(sorted(result.items()))

    def to_json(self) -> str:
        """Canonical text of :meth:`to_dict`."""
        if not self._text:
            self._text.append(_canonical(self.to_dict()))
        return self._text[0]

    @property
    def json_bytes(self) -> int:
        """Length of :meth:`to_json`, which costs far more."""
        if self._text:
            return len(self._text[0])
        rest = replace(self, delivered=EntrySet(), batch=EntrySet(), partial={}).to_json()
        batch = len(',"batch":""') + self.batch.text_bytes if self.batch else 0
        partial = len(_canonical(self._partial())) + len(',"partial":') if self.partial else 0
        return len(rest) + self.delivered.text_bytes + batch + partial

    def _partial(self) -> dict[str, str]:
        return {
            f"{ledger}:{entry}": index_runs(indices)
            for (ledger, entry), indices in sorted(self.partial.items())
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PartitionCheckpoint:
        """Read :meth:`to_dict`'s form; raises ``KeyError``, ``TypeError`` or ``ValueError``."""
        unknown = data.keys() - {"batch", "delivered", "floor", "partial", "published"}
        if unknown:
            raise ValueError(f"unknown field {min(unknown)!r}")
        published = data["published"]
        if type(published) is not int:
            raise ValueError(f"published is {published!r}, not an integer")
        result = cls(
            floor=_parse_id(data["floor"]) if "floor" in data else None,
            delivered=EntrySet.parse(data["delivered"]),
            batch=EntrySet.parse(data.get("batch", "")),
            partial={
                _parse_id(name): parse_indices(indices)
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


def _parse_id(text: str) -> EntryId:
    ledger, _, entry = text.partition(":")
    result = EntryId(int(ledger), int(entry))
    if min(result) < 0 or text != f"{result.ledger}:{result.entry}":
        raise ValueError(f"{text!r} is not an entry id")
    return result


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A durable point of one subscription over all its topic partitions."""

    cluster: str
    """Name of the Pulsar cluster, empty where no admin_url tells it."""
    subscription: str
    ranges: int
    """Number of hash ranges that the layout of this batch uses."""
    partitions: Mapping[TopicPartition, PartitionCheckpoint] = field(default_factory=dict)
    merged: int | None = None
    """Number of layout partitions when ranges share them; ``None``: one per range."""
    parked: Mapping[str, Any] | None = None
    """Keys whose messages rest in the dead-letter topic, as
    :meth:`keyshard.core.dead_letter.parking.Parked.to_dict` says it; ``None``: only the topic
    says it."""
    rescaled: Rescaled | None = None
    """What a restart begins with instead of one range for each of ``parallelism``; only handlers
    and ``batches()`` write it. ``None``: nothing else."""
    _batch_id: list[str] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def batch_id(self) -> str:
        """Name of the batch that ends here: Spark passes no batch id to a source."""
        if not self._batch_id:
            self._batch_id.append(hashlib.sha256(self.to_json().encode()).hexdigest()[:16])
        return self._batch_id[0]

    def to_dict(self) -> dict[str, Any]:
        """The JSON object, keys in canonical order."""
        before, after = self._around()
        partitions = {partition.name: state.to_dict() for partition, state in self._sorted()}
        return before | {"partitions": partitions} | after

    def to_json(self) -> str:
        """Canonical text: equal checkpoints have equal texts.

        Only what is new since an earlier checkpoint is written anew.
        """
        before, after = map(_canonical, self._around())
        partitions = ",".join(
            f"{encode_basestring_ascii(partition.name)}:{state.to_json()}"
            for partition, state in self._sorted()
        )
        return f'{before[:-1]},"partitions":{{{partitions}}},{after[1:]}'

    def _around(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What stands before and after the partitions, in canonical order."""
        merged = {} if self.merged is None else {"merged": self.merged}
        parked = {} if self.parked is None else {"parked": dict(self.parked)}
        rescaled = {} if self.rescaled is None else {"rescaled": self.rescaled.to_dict()}
        after = {"subscription": self.subscription, "version": VERSION}
        before = {"cluster": self.cluster, **merged, **parked}
        return before, {"ranges": self.ranges, **rescaled, **after}

    def _sorted(self) -> list[tuple[TopicPartition, PartitionCheckpoint]]:
        return sorted(self.partitions.items(), key=lambda item: item[0].name)

    @classmethod
    def from_json(cls, text: str) -> Checkpoint:
        """Read :meth:`to_json`'s text.

        Raises:
            CheckpointError: It is not JSON, or not a checkpoint of this version.
        """
        if not isinstance(text, str):
            raise CheckpointError(
                f"The checkpoint is {shown(text)}; give the text that was stored, or None."
            )
        try:
            data = json.loads(text)
        except ValueError as exc:
            raise CheckpointError(f"The checkpoint is not JSON: {exc}.") from exc
        except RecursionError:
            raise CheckpointError("The checkpoint is not one: it is nested too deeply.") from None
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Checkpoint:
        """Read :meth:`to_dict`'s form.

        Raises:
            CheckpointError: A field is missing or wrong, or the version is another one.
        """
        if not isinstance(data, Mapping):
            raise CheckpointError(f"The checkpoint is {type(data).__name__}, not an object.")
        version = data.get("version")
        if type(version) is not int or version != VERSION:
            raise CheckpointError(
                f"The checkpoint has version {version!r}; this keyshard reads version "
                f"{VERSION}. Use the keyshard release that wrote it."
            )
        name = "the checkpoint"
        try:
            ranges = data["ranges"]
            if type(ranges) is not int or not 1 <= ranges <= RING_SIZE:
                raise ValueError(f"ranges is {ranges!r}")
            merged = data.get("merged")
            if merged is not None and (type(merged) is not int or not 1 <= merged < ranges):
                raise ValueError(f"merged is {merged!r}")
            parked = data.get("parked")
            if parked is not None and not isinstance(parked, Mapping):
                raise ValueError(f"parked is {parked!r}")
            rescaled = Rescaled.from_dict(data["rescaled"]) if "rescaled" in data else None
            cluster, subscription = str(data["cluster"]), str(data["subscription"])
            partitions: dict[TopicPartition, PartitionCheckpoint] = {}
            for name, state in data["partitions"].items():
                partitions[TopicPartition.parse(name)] = PartitionCheckpoint.from_dict(state)
        except CheckpointError:
            raise
        except KeyError as exc:
            raise CheckpointError(f"Field {exc} is missing in {name}.") from exc
        except (ValueError, TypeError, AttributeError) as exc:
            raise CheckpointError(f"Cannot read {name}: {exc}.") from exc
        return cls(cluster, subscription, ranges, partitions, merged, parked, rescaled)
