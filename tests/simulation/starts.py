"""Starting positions after the earliest message, and metadata columns of the source.

Drawn from random streams of their own, so that other draws of a seed stay the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from keyshard.broker.memory import Batching, MemoryCluster
from keyshard.broker.memory.log import StoredEntry
from keyshard.core.message import MessageId
from keyshard.core.metadata_columns import METADATA_COLUMNS
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.errors import AdminError, ConfigError, KeyShardError
from tests.simulation.faults import TOPICS, Kind
from tests.simulation.owed import Debts, Place, place_of
from tests.simulation.shape import SUBSCRIPTION

if TYPE_CHECKING:
    from tests.simulation.world import World

SHARE = 0.8
"""Share of the runs that can begin at positions which do."""
BEFORE_MAX = 12
"""Times that something is published before the source begins, at most."""
KILLS_MAX = 2
"""Times that a process is killed between its subscription and the first checkpoint, at most."""
RESETS = 0.6
"""Share of the starts before the first checkpoint that follow a set cursor."""


class Metadata(NamedTuple):
    """The metadata of a message."""

    key_bytes: bytes | None
    sequence_id: int
    producer: str
    deliver_at: datetime | None


class Positions:
    """The starts of a source in topic partitions, and the messages that it owes then.

    Args:
        random: Draws them.
        debts: Records the messages that the source owes.
    """

    def __init__(self, random: Random, debts: Debts) -> None:
        self._random = random
        self._debts = debts
        self._of: dict[TopicPartition, MessageId] = {}

    def draw(self, cluster: MemoryCluster, partitions: Iterable[TopicPartition]) -> None:
        """Let the source begin somewhere in the published messages."""
        for where in partitions:
            if (position := self._drawn(entries_of(cluster, where))) is not None:
                self._of[where] = position
                self._begin_at(cluster, where, position)

    def exist(self, cluster: MemoryCluster, subscription: str) -> bool:
        """Whether a subscription exists wherever there is a position."""
        return all(subscription in cluster.subscriptions(where) for where in self._of)

    def text(self, partitions: Iterable[TopicPartition]) -> str:
        """The option of the source."""
        return json.dumps({one.name: str(self._of.get(one, "earliest")) for one in partitions})

    def set_cursor(
        self, cluster: MemoryCluster, where: TopicPartition, subscription: str, entry_id: EntryId
    ) -> None:
        """A client sets the cursor of a subscription without consumers."""
        begins = self._of.get(where, MessageId(0, 0, 0))
        cluster.reset_cursor(where, subscription, entry_id)
        # If the cursor is set to the entry of the start, the source still begins inside that entry.
        # At any other entry it begins with the whole entry.
        same = EntryId(*begins[:2]) == entry_id
        self._begin_at(cluster, where, begins if same else MessageId(*entry_id, 0))

    def _drawn(self, entries: Sequence[StoredEntry]) -> MessageId | None:
        """A position; ``None``: the earliest."""
        kind = self._random.choice(("earliest", "entry", "inside", "inside", "inside", "end"))
        if kind == "earliest" or not entries:
            return None
        if kind == "end":
            last = entries[-1].id
            return MessageId(last.ledger, last.entry + 1, 0)
        entry = self._random.choice(entries)
        # The position may be after the last message, as the end of a read may be.
        index = self._random.randint(1, len(entry.messages) or 1) if kind == "inside" else 0
        return MessageId(*entry.id, index)

    def _begin_at(self, cluster: MemoryCluster, where: TopicPartition, position: MessageId) -> None:
        """Messages before are not the source's, and all others are."""
        places = {
            Place(where.topic, where.partition, *one.id, index): MessageId(*one.id, index)
            for one in entries_of(cluster, where)
            if not one.hidden
            for index in range(len(one.messages))
        }
        before = {place for place, at in places.items() if at < position}
        inside = (where.topic, where.partition, *position[:2]) if position.batch_index else None
        self._debts.begin(places, before, inside)


def entries_of(cluster: MemoryCluster, where: TopicPartition) -> list[StoredEntry]:
    """The stored entries of a topic partition."""
    log = cluster.log(where)
    return [one for at in range(log.first, len(log)) if (one := log.get(at)) is not None]


class Starts:
    """The start of one run.

    Args:
        world: Where it begins.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._random = Random(f"{world.seed}:starts")
        kinds = {fault.kind for fault in world.injector.faults}
        # A wiped cluster has none of the positions, and topics that come are in no list of them.
        possible = world.shape.admin and not kinds & {Kind.WIPED, *TOPICS}
        self.inside = possible and self._random.random() < SHARE
        """Whether the source begins at positions."""
        self._kills = self._random.randint(0, KILLS_MAX)
        self._positions = Positions(self._random, world.debts)
        self._named = ()
        self._metadata: dict[Place, Metadata] = {}
        self._names = self._random.random() < 0.5

    # -- before the first life -------------------------------------------------------------------

    def prepare(self) -> None:
        """Publish messages, and draw the start of the source among them."""
        if not self.inside:
            return
        world, random = self._world, self._random
        for _ in range(random.randint(0, BEFORE_MAX)):
            keys = [f"k{random.randrange(world.shape.keys)}"] * random.randint(1, 6)
            world.publish(world.topics.lasting, keys, Batching.BY_KEY)
            if random.random() < 0.2:
                world.publish_aborted(random.choice(world.topics.partitions()))
        self._positions.draw(world.cluster, world.topics.partitions())
        world.scheduler.spawn(world.process, "fault", self._kill_early)

    # -- each life -------------------------------------------------------------------------------

    def options(self) -> dict[str, Any]:
        """Return the options of the source of the next life.

        They may change once its subscriptions exist.
        """
        random = Random(f"{self._world.seed}:options:{self._world.lives}")
        named = [name for name in METADATA_COLUMNS if random.random() < 0.4] if self._names else []
        options: dict[str, Any] = {"metadata_columns": named}
        if not self.inside:
            return options
        made = self._positions.exist(self._world.cluster, SUBSCRIPTION)
        earliest = made and random.random() < 0.5
        self._told = self._world.topics.partitions()
        return options | {
            "admin_url": "http://simulated:8080",
            "starting_position": "earliest" if earliest else self._positions.text(self._told),
        }

    def is_rightful(self, error: KeyShardError) -> bool:
        """Whether an error names a topic partition without a position, or entries that another
        client acknowledged while their subscription was created."""
        if isinstance(error, AdminError) and "should begin at" in error.message:
            return self.inside and bool(self._world.debts.skipped)
        grown = self.inside and self._world.topics.partitions() != self._told
        return grown and isinstance(error, ConfigError) and "has no position for" in error.message

    def _exists(self, where: TopicPartition) -> bool:
        return SUBSCRIPTION in self._world.cluster.subscriptions(where)

    def _kill_early(self) -> None:
        """Kill processes between their subscriptions and the first checkpoint."""
        world = self._world
        while self._kills and world.injector.enabled and not world.storage.commits:
            query = world.query
            if query is None or not any(map(self._exists, world.topics.partitions())):
                world.scheduler.sleep(0.002)
                continue
            self._kills -= 1
            world.scheduler.sleep(self._random.random() * 0.2)
            if world.query is query and not query.process.dead:
                world.record.note(f"FAULT killed early, with {len(world.storage.offsets)} offsets")
                world.end(query.process)

    def between_lives(self) -> None:
        """A client sets a cursor, while no consumer is connected and no batch is planned."""
        world, random = self._world, self._random
        if not self.inside or world.storage.offsets or world.lives == 0:
            return
        where = random.choice(world.topics.partitions())
        if random.random() >= RESETS or not self._exists(where):
            return
        subscription = world.cluster.subscriptions(where)[SUBSCRIPTION]
        visible = [
            one
            for one in entries_of(world.cluster, where)
            if not one.hidden and (where, one.id) not in world.refused.entries
        ]
        if subscription.connected or not visible or world.debts.skipped_entries:
            return
        entry = random.choice(visible)
        world.record.note(f"FAULT the cursor of {where} is set to {entry.id}")
        world.record.set_cursor(world.debts)
        self._positions.set_cursor(world.cluster, where, SUBSCRIPTION, entry.id)

    # -- metadata --------------------------------------------------------------------------------

    def sent(self, where: TopicPartition, entry: StoredEntry) -> None:
        """The broker has an entry."""
        for index, message in enumerate(entry.messages):
            due_ms = message.deliver_at_ms
            place = Place(where.topic, where.partition, *entry.id, index)
            self._metadata[place] = Metadata(
                message.key_bytes,
                entry.sequence_id + index,
                entry.producer,
                None if due_ms is None else datetime.fromtimestamp(due_ms / 1000, timezone.utc),
            )

    def check(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """The metadata of rows equals the stored metadata."""
        for row in rows:
            stored = self._metadata[place_of(row)]
            for name, value in (
                ("__keyBytes", stored.key_bytes), ("__sequenceId", stored.sequence_id),
                ("__producer", stored.producer), ("__orderingKey", None),
                ("__brokerPublishTime", None), ("__replicatedFrom", None),
                ("__deliverAt", stored.deliver_at),
            ):  # fmt: skip
                assert row.get(name, value) == value, f"{name} is {row[name]!r}, not {value!r}"
