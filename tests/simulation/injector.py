"""Makes the planned faults happen."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING, ClassVar

from keyshard.broker.memory.log import StoredEntry
from keyshard.core.position.entry import TopicPartition
from keyshard.core.topic_segments import topic_of
from tests.simulation.faults import CRASHES, Fault, Kind, Reached, plan
from tests.simulation.network import Client, Consumer
from tests.simulation.scheduler import Process
from tests.simulation.segments import Segments
from tests.simulation.shape import SUBSCRIPTION
from tests.simulation.spark import Query, Step, UserError

if TYPE_CHECKING:
    from tests.simulation.world import World

TERMINATE_S = 4.0
"""Longest time from a request to stop to the end of a process, seconds."""
AGAIN_MAX = 20
"""Entries of a topic partition that are delivered twice at most."""
FOREIGN_MAX = 5
"""Most entries that another client acknowledges at once."""
AWAY_S = (0.05, 3.0)
"""Time that a killed broker is away, seconds."""
WIPED_S = (3.5, 10.0)
"""The same, while its data are deleted."""
OUTAGE_S = (20.0, 50.0)
"""The same, when it is longer than clients wait; a query may fail then, with a named error."""
PATIENCE_S = 5.0
"""Longest wait of a fault for a consumer that it can hit, seconds."""


class Injector:
    """The faults of one run.

    Args:
        world: The run.
        random: Plans them, and decides their targets.
    """

    def __init__(self, world: World, random: Random) -> None:
        self._world = world
        self._random = random
        self.faults = plan(world.seed, random, world.cells) + world.more_faults()
        self.reached: Reached = Reached()
        """How often each fault hit each step."""
        self.changes = 0
        """How often the number of ranges changed."""
        self.broker_crashes = 0
        """How often the broker was killed."""
        self.stopping: set[Process] = set()
        """Processes that were asked to end."""
        self.enabled = True
        """Whether faults may begin."""
        self._visits = dict.fromkeys(Step, 0)
        self._poison: dict[bytes, int] = {}
        self._full_before: Step | None = None

    @property
    def all_begun(self) -> bool:
        """Whether nothing is left to happen."""
        return all(fault.begun for fault in self.faults)

    def heal(self) -> None:
        """No fault from now on; lasting ones end."""
        self.enabled = False
        self._world.network.cut_share = 0.0
        self._world.network.slow.clear()
        self._poison.clear()

    def at(self, query: Query, step: Step) -> None:
        """Begin a step; a fault may end the process, or raise :class:`UserError`."""
        self._note_full(query, step)
        self._visits[step] += 1
        for fault in self.faults:
            due = fault.step is step and self._visits[step] >= fault.visit
            if fault.begun or not due or not self.enabled:
                continue
            if fault.kind is Kind.FORGETS and not self._remembers():
                continue  # the next time that this step begins
            fault.begun = True
            if fault.delay_s or not self._act(fault.kind, query):
                self._spawn(partial(self._later, fault, query, fault.delay_s))
            elif fault.kind is Kind.POISON and step is Step.SINKING:
                raise UserError("the sink fails")

    def poisoned(self, value: bytes) -> None:
        """A task reads a row; raises :class:`UserError` while the row is poison."""
        left = self._poison.get(value, 0)
        if left:
            self._poison[value] = left - 1
            raise UserError(f"poison row {value!r}")

    # -- when -----------------------------------------------------------------------------------

    def _spawn(self, action: Callable[[], None]) -> None:
        self._world.scheduler.spawn(self._world.process, "fault", action)

    def _later(self, fault: Fault, query: Query, delay_s: float) -> None:
        """Act once there is something to hit, unless the process is gone by then."""
        scheduler = self._world.scheduler
        scheduler.sleep(delay_s)
        end = scheduler.now_s + PATIENCE_S
        while self._world.query is query and scheduler.now_s < end:
            if self._act(fault.kind, query):
                break
            scheduler.sleep(0.002)

    def _note_full(self, query: Query, step: Step) -> None:
        """Count a full window for the step that ends and for the step that begins."""
        coordinator = query.coordinator
        before, self._full_before = self._full_before, step
        small = any(fault.kind is Kind.MEMORY for fault in self.faults)
        if small and coordinator is not None and coordinator.status()["windowFill"] >= 1:
            for one in (before, step) if before not in (None, step) else (step,):
                self.reached[Kind.MEMORY, one] += 1

    # -- faults ---------------------------------------------------------------------------------

    def _act(self, kind: Kind, query: Query) -> bool:
        """Make a fault happen now. Return whether there was something that it could hit."""
        step = query.step
        if kind is Kind.MEMORY:
            return True
        if not self._ACTIONS[kind](self, query):
            return False
        self._world.record.note(f"FAULT {kind.value} at {step.value}")
        self.reached[kind, step] += 1
        if kind in CRASHES:
            self._world.end(query.process)
        return True

    def _crash(self, query: Query) -> bool:
        return not query.process.dead

    def _stop(self, query: Query) -> bool:
        world, process = self._world, query.process
        if process.dead or process in self.stopping:
            return False
        self.stopping.add(process)
        stopper = world.scheduler.spawn(process, "stopper", query.stop)

        def end() -> None:
            until = world.scheduler.now_s + TERMINATE_S
            while not stopper.done and world.scheduler.now_s < until:
                world.scheduler.sleep(0.01)
            if not process.dead:
                world.end(process)

        self._spawn(end)
        return True

    def _other_n(self, query: Query) -> bool:
        self.changes += 1
        return self._crash(query)

    def _worker(self, query: Query) -> bool:
        threads = self._world.shape.options["receive_threads"]
        share = self._consumers(query.process)[self._random.randrange(threads) :: threads]
        return self._world.network.lose(share)

    def _broker(self, query: Query, wipe: Callable[[], None] | None = None) -> bool:  # noqa: ARG002
        world = self._world
        if not world.network.up:
            return False
        world.record.add("crashed", worker="broker")
        self.broker_crashes += 1
        world.network.up = False
        world.network.lose([one for client in world.network.clients for one in client.consumers])
        world.network.lose_readers()
        world.cluster.crash() if wipe is None else wipe()

        outage = self._random.random() < 0.1
        world.network.outages += outage
        away = AWAY_S if wipe is None else WIPED_S
        away_s = self._random.uniform(*(OUTAGE_S if outage else away))

        def back() -> None:
            world.scheduler.sleep(away_s)
            world.network.up = True

        self._spawn(back)
        return True

    def _forgets(self, query: Query) -> bool:
        return self._remembers() and self._broker(query)

    def _remembers(self) -> bool:
        """Whether there are acknowledgements that no cursor has stored: a crash forgets them."""
        world = self._world
        found = [
            world.cluster.subscriptions(where).get(SUBSCRIPTION)
            for where in world.topics.partitions()
        ]
        return any(one is not None and one.cursor.unwritten for one in found)

    def _wiped(self, query: Query) -> bool:
        return self._world.wiped is None and self._broker(query, self._world.wipe)

    def _foreign(self, query: Query) -> bool:
        """Acknowledge entries as another client. Return whether there were any.

        In half of the cases, publish them while the source is disconnected, so that it never
        receives them.
        """
        world = self._world
        found = [
            (where, subscriptions[SUBSCRIPTION])
            for where in world.topics.partitions()
            if SUBSCRIPTION in (subscriptions := world.cluster.subscriptions(where))
        ]
        if not found or not world.network.up or world.wiped:
            return False
        where, subscription = self._random.choice(found)
        log, first = subscription.log, subscription.log.first
        if self._random.random() < 0.5:
            of_it = [one for one in self._consumers(query.process) if one.topic_partition == where]
            world.network.lose(of_it)
            first = len(log)
            keys = [f"k{self._random.randrange(world.shape.keys)}" for _ in range(10)]
            world.publish(topic_of(where), keys)
        entries = [
            entry
            for ordinal in range(first, len(log))
            if not subscription.cursor.is_acked(ordinal)
            and (entry := log.get(ordinal)) is not None
            and not entry.hidden
        ]
        start = self._random.randrange(len(entries)) if entries else 0
        taken = entries[start : start + self._random.randint(1, FOREIGN_MAX)]
        for entry in taken:
            self._acknowledge(where, entry)
        return bool(taken)

    def _acknowledge(self, where: TopicPartition, entry: StoredEntry) -> None:
        world = self._world
        indices = list(range(len(entry.messages)))
        if len(indices) > 1 and self._random.random() < 0.5:
            indices = self._random.sample(indices, len(indices) - 1)
            world.cluster.acknowledge_indices(where, SUBSCRIPTION, entry.id, indices)
        else:
            if (where, entry.id) not in world.refused.entries:
                world.debts.skipped[where, entry.id] = world.is_known(where, entry.id)
            world.cluster.acknowledge(where, SUBSCRIPTION, [entry.id])
        world.debts.skip(where, entry.id, indices)

    def _acks(self, query: Query) -> bool:
        client = self._client(query.process)
        if client is None or not self._consumers(query.process):
            return False
        client.loses_acks = True

        def cut() -> None:
            self._world.scheduler.sleep(self._random.uniform(0.1, 1.0))
            client.loses_acks = False
            self._world.network.lose(client.consumers)

        self._spawn(cut)
        return True

    def _twice(self, query: Query) -> bool:
        cluster, debts = self._world.cluster, self._world.debts
        again = 0
        for where in sorted({one.topic_partition for one in self._consumers(query.process)}):
            log = cluster.log(where)
            newest = range(max(log.first, len(log) - AGAIN_MAX), len(log))
            # Entries before the start, or acknowledged by another client, are no redelivery.
            ids = [
                log.id(one)
                for one in newest
                if (where, log.id(one)) not in debts.skipped
                and not debts.lies_before(where, log.id(one))
            ]
            again += cluster.deliver_again(where, SUBSCRIPTION, *ids)
        return again > 0

    def _unload(self, query: Query) -> bool:
        cluster, stored = self._world.cluster, self._world.topics.partitions()
        if not stored:
            return False
        where = self._random.choice(stored)
        hit = self._world.network.lose(
            [one for one in self._consumers(query.process) if one.topic_partition == where]
        )
        if hit:
            self._world.network.lose_readers([where])
            cluster.unload(where)
        return hit

    def _growth(self, query: Query) -> bool:  # noqa: ARG002
        cluster, topic = self._world.cluster, self._world.topics.lasting
        cluster.grow_topic(topic, len(cluster.partitions(topic)) + 1)
        return True

    def _comes(self, query: Query) -> bool:  # noqa: ARG002
        return self._world.topics.come()

    def _goes(self, query: Query) -> bool:  # noqa: ARG002
        world = self._world
        if world.wiped or not world.topics.go():
            return False

        def come() -> None:
            world.scheduler.sleep(self._random.uniform(0.0, 3.0))
            if self.enabled:
                world.topics.come()

        self._spawn(come)
        return True

    def _split(self, query: Query) -> bool:  # noqa: ARG002
        return self._segments.split()

    def _merge(self, query: Query) -> bool:  # noqa: ARG002
        return self._segments.merge()

    def _collect(self, query: Query) -> bool:  # noqa: ARG002
        return self._segments.collect()

    @property
    def _segments(self) -> Segments:
        assert self._world.segments is not None, "only scalable topics have segments"
        return self._world.segments

    def _uncovered(self, query: Query) -> bool:
        consumers = self._consumers(query.process)
        if not consumers:
            return False
        hash_range = self._random.choice(consumers).hash_range
        share = [one for one in consumers if one.hash_range == hash_range]
        return self._world.network.lose(share, self._random.uniform(1.0, 4.0))

    def _slow(self, query: Query) -> bool:
        world = self._world
        consumers = self._consumers(query.process)
        if not consumers:
            return False
        one = self._random.choice(consumers)
        owned_range = one.topic_partition, one.hash_range
        world.network.slow.add(owned_range)

        def quick() -> None:
            world.scheduler.sleep(self._random.uniform(2.0, 5.0))
            world.network.slow.discard(owned_range)

        self._spawn(quick)
        return True

    def _poison_row(self, query: Query) -> bool:
        if query.rows:
            self._poison[self._random.choice(query.rows)] = self._random.randint(1, 6)
        return bool(query.rows)

    _ACTIONS: ClassVar = {
        Kind.DRIVER: _crash, Kind.OTHER_N: _other_n, Kind.STOP: _stop, Kind.WORKER: _worker,
        Kind.BROKER: _broker, Kind.ACKS: _acks, Kind.TWICE: _twice, Kind.UNLOAD: _unload,
        Kind.GROWTH: _growth, Kind.UNCOVERED: _uncovered, Kind.SLOW: _slow,
        Kind.POISON: _poison_row, Kind.COMES: _comes, Kind.GOES: _goes,
        Kind.FORGETS: _forgets, Kind.FOREIGN: _foreign, Kind.WIPED: _wiped,
        Kind.SPLIT: _split, Kind.MERGE: _merge, Kind.COLLECT: _collect,
    }  # fmt: skip
    """Each returns whether it hit anything."""

    def _client(self, process: Process) -> Client | None:
        own = self._clients(process)
        return self._random.choice(own) if len(own) > 1 else own[0] if own else None

    def _clients(self, process: Process) -> list[Client]:
        processes = self._world.processes_of(process)
        return [one for one in self._world.network.clients if one.process in processes]

    def _consumers(self, process: Process) -> list[Consumer]:
        consumers = [one for client in self._clients(process) for one in client.consumers]
        return [one for one in consumers if one.is_live]
