"""Where the source begins in runs that do not begin at the earliest message, and what it names.

Drawn from random streams of their own: what else a seed decides stays as it was.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from keyshard.broker.memory import Batching
from keyshard.broker.memory.log import StoredEntry
from keyshard.core.message import MessageId
from keyshard.core.metadata_columns import METADATA_COLUMNS
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.errors import ConfigError, KeyShardError
from tests.simulation.debts import Place, place_of
from tests.simulation.faults import TOPICS, Kind
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
"""Share of the lives before the first checkpoint before which somebody sets a cursor."""


class Metadata(NamedTuple):
    """What a message says beside its content."""

    key_bytes: bytes | None
    sequence_id: int
    producer: str


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
        self._positions: dict[TopicPartition, MessageId] = {}
        self._named = ()
        self._metadata: dict[Place, Metadata] = {}
        self._names = self._random.random() < 0.5

    # -- before the first life -------------------------------------------------------------------

    def prepare(self) -> None:
        """Something is published, and somewhere in it the source is to begin."""
        if not self.inside:
            return
        world, random = self._world, self._random
        for _ in range(random.randint(0, BEFORE_MAX)):
            keys = [f"k{random.randrange(world.shape.keys)}"] * random.randint(1, 6)
            world.publish(world.topics.lasting, keys, Batching.BY_KEY)
            if random.random() < 0.2:
                world.publish_aborted(random.choice(world.topics.partitions()))
        for where in world.topics.partitions():
            if (position := self._draw(where)) is not None:
                self._positions[where] = position
                self._begin_at(where, position)
        world.scheduler.spawn(world.process, "fault", self._kill_early)

    def _entries(self, where: TopicPartition) -> list[StoredEntry]:
        log = self._world.cluster.log(where)
        return [one for at in range(log.first, len(log)) if (one := log.get(at)) is not None]

    def _draw(self, where: TopicPartition) -> MessageId | None:
        """A position; ``None``: the earliest."""
        entries = self._entries(where)
        kind = self._random.choice(("earliest", "entry", "inside", "inside", "inside", "end"))
        if kind == "earliest" or not entries:
            return None
        if kind == "end":
            last = entries[-1].id
            return MessageId(last.ledger, last.entry + 1, 0)
        entry = self._random.choice(entries)
        # Also behind its last message, as the end of a read may be.
        index = self._random.randint(1, len(entry.messages) or 1) if kind == "inside" else 0
        return MessageId(*entry.id, index)

    def _begin_at(self, where: TopicPartition, position: MessageId) -> None:
        """What lies before is not the source's, and all the rest is."""
        debts = self._world.debts
        places = {
            Place(where.topic, where.partition, *one.id, index): MessageId(*one.id, index)
            for one in self._entries(where)
            if not one.hidden
            for index in range(len(one.messages))
        }
        debts.begin(places, {place for place, at in places.items() if at < position})

    # -- each life -------------------------------------------------------------------------------

    def options(self) -> dict[str, Any]:
        """Of the source of the next life; they may change once its subscriptions exist."""
        random = Random(f"{self._world.seed}:options:{self._world.lives}")
        named = [name for name in METADATA_COLUMNS if random.random() < 0.4] if self._names else []
        options: dict[str, Any] = {"metadata_columns": named}
        if not self.inside:
            return options
        made = all(map(self._exists, self._positions))
        earliest = made and random.random() < 0.5
        self._told = self._world.topics.partitions()
        start = {one.name: str(self._positions.get(one, "earliest")) for one in self._told}
        return options | {
            "admin_url": "http://simulated:8080",
            "starting_position": "earliest" if earliest else json.dumps(start),
        }

    def is_rightful(self, error: KeyShardError) -> bool:
        """Whether an error says that a topic partition came of which no position was told."""
        grown = self.inside and self._world.topics.partitions() != self._told
        return grown and isinstance(error, ConfigError) and "says nothing of" in error.message

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
        """Somebody sets a cursor, while nobody is connected and nothing is planned."""
        world, random = self._world, self._random
        if not self.inside or world.storage.offsets or world.lives == 0:
            return
        where = random.choice(world.topics.partitions())
        if random.random() >= RESETS or not self._exists(where):
            return
        subscription = world.cluster.subscriptions(where)[SUBSCRIPTION]
        visible = [one for one in self._entries(where) if not one.hidden]
        if subscription.connected or not visible or world.debts.skipped_entries:
            return
        entry = random.choice(visible)
        begins = self._positions.get(where, MessageId(0, 0, 0))
        world.record.note(f"FAULT the cursor of {where} is set to {entry.id}")
        world.cluster.reset_cursor(where, SUBSCRIPTION, entry.id)
        # Just at its entry the source goes on where it began; elsewhere at whole entries.
        same = EntryId(*begins[:2]) == entry.id
        self._begin_at(where, begins if same else MessageId(*entry.id, 0))

    # -- metadata --------------------------------------------------------------------------------

    def sent(self, where: TopicPartition, entry: StoredEntry) -> None:
        """The broker has an entry."""
        for index, message in enumerate(entry.messages):
            place = Place(where.topic, where.partition, *entry.id, index)
            self._metadata[place] = Metadata(
                message.key_bytes, entry.sequence_id + index, entry.producer
            )

    def check(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """What rows say beside their content is what was stored, whatever was named."""
        for row in rows:
            stored = self._metadata[place_of(row)]
            for name, value in (
                ("__keyBytes", stored.key_bytes), ("__sequenceId", stored.sequence_id),
                ("__producer", stored.producer), ("__orderingKey", None),
                ("__brokerPublishTime", None),
            ):  # fmt: skip
                assert row.get(name, value) == value, f"{name} is {row[name]!r}, not {value!r}"
