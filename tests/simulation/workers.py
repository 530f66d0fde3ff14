"""The third world: the query of the first one, with its consumers in worker processes that die.

A worker runs the real :class:`~keyshard.workers.host.ConsumerHost` in a simulated process of its
own. The content of Arrow Flight travels as JSON, takes time, and is lost, repeated or late.
"""

from __future__ import annotations

import json
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import pyarrow as pa

from keyshard.broker.port import Broker, StartPosition, SubscriptionSpec
from keyshard.coordinator.batch_reading import FETCH_TIMEOUT_S
from keyshard.core.position.entry import TopicPartition
from keyshard.core.ring.hash_range import HashRange
from keyshard.errors import BrokerUnavailableError, KeyShardError, WorkerUnreachableError
from keyshard.testing.verify.check_workers import ring_coverage
from keyshard.workers.broker import RemoteBroker
from keyshard.workers.encoding import (
    DeliveredTotals,
    RemoteContent,
    WorkerDelivery,
    decode_deliveries,
    decode_error,
    encode_error,
)
from keyshard.workers.host import ConsumerHost
from keyshard.workers.server import Lease
from keyshard.workers.worker import LEASE_S, TAKE_WAIT_S, Worker
from tests.simulation.network import OPERATION_TIMEOUT_S, UNNOTICED_S, Client, Consumer
from tests.simulation.scheduler import Process
from tests.simulation.spark import Step
from tests.simulation.worker_faults import Trouble
from tests.simulation.world import TRACE_MAX, Outcome, World

START_S = (0.1, 1.0)
"""Time that a worker takes to start, seconds."""
TROUBLE_S = 2.0
"""Mean time between two strikes at a worker, seconds."""
LOST = 0.002
"""Share of lost answers: the outcome of their requests is unknown."""
REPEATED = 0.02
"""Share of the questions that arrive twice."""
TRAVEL_S = (0.002, 0.002, 0.002, 0.05)
"""Longest times of most questions and answers on their way; a run has one of them, seconds."""
STOPS_S = (0.5, 2.5 * LEASE_S)
"""Shortest and longest time that a worker is stopped, seconds."""
LOOK_S = 0.005
"""Time between two looks whether an answer is there, seconds."""


class SimulatedWorker(Worker):
    """A worker in a simulated process.

    Args:
        world: Its world.
        process: Its process.
    """

    def __init__(self, world: WorkersWorld, process: Process) -> None:
        self._world = world
        self._scheduler = world.scheduler
        self._random = world.strikes
        self.process = process
        self.kind = self.name = process.name
        self.pid, self.machine = 0, "here"
        self._seq = 0
        self.lost = False
        self.released: deque[int] = deque()
        self.keeps_content = world.keeps
        self.content_endpoint = (self, "")  # type: ignore[assignment]
        """The address at which tasks fetch its content."""
        self.gone = False
        """Whether its connections have ended with it."""
        self.given_up = False
        """Whether the source knows that it ended; then pending requests fail."""
        self._leaves = False
        self.client = _WorkerClient(world, process)
        self._host = self._made()
        self.lease = Lease(LEASE_S, lambda: self._scheduler.now_s)
        self._main = self._scheduler.spawn(process, "main", self._live)

    def _made(self) -> ConsumerHost:
        self._scheduler.sleep(self._random.uniform(*START_S))
        made: list[ConsumerHost] = []

        def make() -> None:
            made.append(ConsumerHost(self.client, keeps=self._world.keeps))

        task = self._scheduler.spawn(self.process, "begin", make)
        while not task.done and not self.process.dead:
            self._scheduler.sleep(LOOK_S)
        if not made:
            raise WorkerUnreachableError(f"{self.name} did not start.")
        return made[0]

    def _live(self) -> None:
        """Run until the input or the lease ends, as the process does."""
        while not self._leaves and (left_s := self.lease.left_s()) > 0:
            self._scheduler.block(min(1.0, max(0.01, left_s)))
        if self.lease.left_s() > 0:
            self._host.close()
        self._world.end_worker(self, surely=True)

    def request(self, command: str, timeout_s: float, **arguments: Any) -> Any:
        arguments = json.loads(json.dumps(arguments))

        def act() -> Any:
            try:
                return [getattr(self._host, command)(**arguments), None]
            except KeyShardError as exc:
                return [None, encode_error(exc)]

        result, error = json.loads(json.dumps(self._crossed(act, timeout_s)))
        if error is not None:
            raise decode_error(error)
        return result

    def take(self, taken: Mapping[int, DeliveredTotals]) -> list[WorkerDelivery]:
        seq = self._seq + 1
        released = [self.released.popleft() for _ in range(len(self.released))]
        answer, content = self._crossed(
            lambda: self._host.take(seq, dict(taken), TAKE_WAIT_S, released), LEASE_S
        )
        self._seq = seq
        kept = RemoteContent(self, seq) if answer["kept"] else None
        return decode_deliveries(json.loads(json.dumps(answer["deliveries"])), content, kept)

    def fetch(self, runs: Sequence[Any], columns: Sequence[str]) -> pa.RecordBatch:
        """Content for a task."""
        self._travel()
        end_s = self._scheduler.now_s + FETCH_TIMEOUT_S
        while self.process.stopped and self._scheduler.now_s < end_s:
            self._scheduler.sleep(LOOK_S)
        lost = self._world.injector.enabled and self._random.random() < LOST
        if lost or self.process.dead or self.process.stopped or self.lease.left_s() <= 0:
            raise WorkerUnreachableError(f"{self.name} does not send the content of messages.")
        try:
            return self._host.content(runs, columns)
        except KeyShardError as exc:
            raise WorkerUnreachableError(exc.message) from exc

    def _crossed(self, act: Callable[[], Any], timeout_s: float) -> Any:
        """Run a request at the worker, over the network, and return its answer."""
        end_s = self._scheduler.now_s + timeout_s
        answers: list[Any] = []
        refusals: list[str] = []

        def arrive() -> None:
            if not self.lease.renew():
                refusals.append("its lease has ended")
                return
            try:
                answers.append(act())
            except KeyShardError as exc:
                refusals.append(exc.message)

        self._travel()
        twice = self._random.random() < REPEATED
        self._world.met[Trouble.REPEATED] += twice
        for _ in range(1 + twice):
            self._scheduler.spawn(self.process, "question", arrive)
        while not (answers or refusals or self._noticed_dead) and self._scheduler.now_s < end_s:
            self._scheduler.sleep(LOOK_S)
        self._travel()
        if answers and self._world.injector.enabled and self._random.random() < LOST:
            self._world.met[Trouble.LOST] += 1
            answers.clear()
        if not answers:
            raise WorkerUnreachableError(f"{self.name} does not answer {refusals}.")
        return answers[0]

    @property
    def _noticed_dead(self) -> bool:
        return self.given_up or self.process.dead

    def _travel(self) -> None:
        late = self._random.random() < 0.01
        self._world.met[Trouble.LATE] += late
        most_s = 0.5 if late else self._world.travel_s
        self._scheduler.sleep(self._random.random() * most_s)

    def kill(self) -> None:
        self._world.end_worker(self)

    def leave(self) -> None:
        self._leaves = True
        self._scheduler.wake(self._main)

    def end(self, timeout_s: float) -> None:
        if timeout_s:
            self.leave()
        end_s = self._scheduler.now_s + timeout_s
        while not self.gone and self._scheduler.now_s < end_s:
            self._scheduler.sleep(LOOK_S)
        self.kill()


class _WorkerClient(Client):
    """A worker's connection."""

    def __init__(self, world: WorkersWorld, process: Process) -> None:
        super().__init__(world.network, process)
        self._world = world

    def subscribe(self, spec: SubscriptionSpec, start: StartPosition) -> Consumer:
        self._world.claims(self, spec.topic_partition, spec.hash_range)
        return super().subscribe(spec, start)


class WorkersWorld(World):
    """A run of a query with consumers in worker processes."""

    def __init__(self, seed: int, *, trace_max: int | None = TRACE_MAX) -> None:
        super().__init__(seed, trace_max=trace_max)
        self.strikes = Random(f"{seed}:workers")
        self._count = self.strikes.choice((1, 2, 2, 3))
        self.keeps = Random(f"{seed}:keeps").random() < 0.5
        """Whether workers keep content, and tasks get it from them."""
        self._workers: dict[Process, list[SimulatedWorker]] = {}
        self._started = 0
        self._struck = False
        """Whether anything has happened to a worker, or to an answer of one."""
        self._far = self.strikes.random() < 0.5
        """Whether workers are on other machines. A stopped one cannot be killed from here."""
        self.travel_s = self.strikes.choice(TRAVEL_S)
        """Longest time of most questions and answers on their way, seconds."""
        self.met = Counter[Trouble]()
        self.met[Trouble.SLOW] += self.travel_s > min(TRAVEL_S)

    @property
    def settle_s(self) -> float:
        """Longer if each message takes two requests over a slow network."""
        one_by_one = self.shape.options.get("receiver_queue_size") == 1
        return super().settle_s + 4 * self.travel_s * self.messages * one_by_one

    def run(self) -> Outcome:
        outcome = super().run()
        outcome.reached.update({(trouble, None): count for trouble, count in self.met.items()})
        return outcome

    def claims(self, by: Client, where: TopicPartition, hash_range: HashRange) -> None:
        """Count a claim to a range that another worker still has at the broker."""
        self.met[Trouble.CLAIMED_TWICE] += any(
            consumer.is_live
            and (consumer.topic_partition, consumer.hash_range) == (where, hash_range)
            for workers in self._workers.values()
            for worker in workers
            if worker.client is not by
            for consumer in worker.client.consumers
        )

    def _main(self) -> None:
        self.scheduler.spawn(self.process, "strikes", self._strike)
        super()._main()

    def connection(self, process: Process) -> Broker:
        def start(_stop: threading.Event) -> SimulatedWorker:
            self._started += 1
            self._struck |= self._started > self._count
            mine = self.scheduler.process(f"{process.name}.worker-{self._started}")
            worker = SimulatedWorker(self, mine)
            self._workers.setdefault(process, []).append(worker)
            return worker

        return RemoteBroker(super().connection(process), start, self._count, OPERATION_TIMEOUT_S)

    def _rightful(self, error: KeyShardError) -> bool:
        # A worker may die while a query starts, or while it gives its ranges back at its end.
        query = self.query
        brief = self.shape.bounded or query is None or query.step is Step.STARTING
        gone = isinstance(error, (BrokerUnavailableError, WorkerUnreachableError))
        return (gone and brief and self._struck) or super()._rightful(error)

    def _settled(self) -> bool:
        """Whether, in addition, no worker is frozen and each ended one was replaced."""
        workers = [one for workers in self._workers.values() for one in workers if not one.gone]
        if any(one.process.stopped for one in workers) or not super()._settled():
            return False
        if self.wiped is not None:
            return True
        return ring_coverage(self.record.judged(self.debts, self.topics.partitions())).holds

    def processes_of(self, process: Process) -> list[Process]:
        return [process, *(one.process for one in self._workers.get(process, ()))]

    def _strike(self) -> None:
        """Kill workers, and stop them, while faults may begin."""
        while self.injector.enabled:
            self.scheduler.sleep(self.strikes.expovariate(1 / TROUBLE_S))
            alive = [
                worker
                for process, workers in self._workers.items()
                for worker in workers
                if not process.dead and not worker.process.dead
            ]
            if not alive or not self.injector.enabled:
                continue
            worker = self.strikes.choice(alive)
            if self.strikes.random() < 0.6:
                self.record.note(f"FAULT {worker.name} is killed")
                self.met[Trouble.KILLED] += 1
                self.end_worker(worker, surely=True)
            elif not worker.process.stopped and self.network.up:
                self._stop(worker)

    def _stop(self, worker: SimulatedWorker) -> None:
        """Stop a worker (SIGSTOP); it goes on later, in time or not, unless it is killed before."""
        self.record.note(f"FAULT {worker.name} is stopped")
        self.met[Trouble.STOPPED] += 1
        self._struck = True
        worker.client.freeze()
        self.scheduler.stop(worker.process)
        stops_s = self.strikes.uniform(*STOPS_S)

        def wake() -> None:
            self.scheduler.sleep(stops_s)
            if worker.gone:
                return
            late = worker.lease.left_s() <= 0
            self.record.note(f"{worker.name} goes on, {'too late' if late else 'in time'}")
            self.met[Trouble.WOKE_LATE if late else Trouble.WOKE_IN_TIME] += 1
            self.scheduler.go_on(worker.process)
            while not self.network.up:
                self.scheduler.sleep(LOOK_S)
            if not worker.gone:
                worker.client.thaw()

        self.scheduler.spawn(self.process, "wake", wake)

    def wipe(self) -> None:
        # No cluster is created again within a lease; a stopped worker has been given up by then.
        for workers in self._workers.values():
            for worker in workers:
                if worker.process.stopped:
                    self.end_worker(worker, surely=True)
        super().wipe()

    def end_worker(self, worker: SimulatedWorker, *, surely: bool = False) -> None:
        """End a worker at once; the broker notices now or later.

        Args:
            worker: The worker.
            surely: Whether to end also one that is stopped on another machine.
        """
        if worker.gone:
            return
        self._struck = True
        self._give_up(worker)
        if self._far and worker.process.stopped and not surely:
            return
        worker.gone = True
        unnoticed = self.strikes.random() < 0.3
        self.network.lose_client(
            worker.client, self.strikes.random() * UNNOTICED_S if unnoticed else 0.0
        )
        self.scheduler.kill(worker.process)

    def _give_up(self, worker: SimulatedWorker) -> None:
        """Count a worker as ended: its source takes nothing of it any more."""
        if not worker.given_up:
            worker.given_up = True
            worker.client.heard = False
            self.record.add("crashed", worker=worker.name)

    def end(self, process: Process) -> None:
        left = [one for one in self._workers.get(process, ()) if not one.gone]
        for worker in left:
            self._give_up(worker)
            if worker.process.stopped:
                self.end_worker(worker)

        def leave() -> None:
            """Close the input of the workers. Within one lease, end those that still run."""
            for worker in left:
                worker.leave()
            self.scheduler.sleep(self.strikes.uniform(0.0, LEASE_S))
            for worker in left:
                self.end_worker(worker)

        self.scheduler.spawn(self.process, "input ended", leave)
        super().end(process)
