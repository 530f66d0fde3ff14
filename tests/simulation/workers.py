"""The third world: the query of the first one, with its consumers in worker processes that die.

A worker runs the real :class:`~keyshard.broker.hosted.host.Host` in a simulated process of its own.
What Arrow Flight would carry crosses as JSON, takes time, and is lost, repeated or late.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from keyshard.broker.hosted.broker import HostedBroker
from keyshard.broker.hosted.host import Host
from keyshard.broker.hosted.wire import Delivery, heard, told, unpacked
from keyshard.broker.hosted.worker import LEASE_S, TAKE_WAIT_S, Worker
from keyshard.broker.port import Broker
from keyshard.errors import BrokerUnavailableError, KeyShardError, WorkerUnreachableError
from tests.simulation.network import OPERATION_TIMEOUT_S, UNNOTICED_S, Client
from tests.simulation.scheduler import Process, Task
from tests.simulation.spark import Step
from tests.simulation.world import World

START_S = (0.1, 1.0)
"""Time that a worker takes to start, seconds."""
TROUBLE_S = 2.0
"""Mean time between two strikes at a worker, seconds."""
LOST = 0.002
"""Share of the answers that are lost: then nobody knows whether it was done."""
REPEATED = 0.02
"""Share of the questions that arrive twice."""
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
        self.answers = True
        """Whether it does; a process that was stopped does not, and nobody notices but by that."""
        self.gone = False
        """Whether its connections have ended with it."""
        self._leaving: Task | None = None
        self.client = Client(world.network, process)
        self._host = self._made()

    def _made(self) -> Host:
        self._scheduler.sleep(self._random.uniform(*START_S))
        made: list[Host] = []

        def make() -> None:
            made.append(Host(self.client))

        task = self._scheduler.spawn(self.process, "main", make)
        while not task.done and not self.process.dead:
            self._scheduler.sleep(LOOK_S)
        if not made:
            raise WorkerUnreachableError(f"{self.name} did not start.")
        return made[0]

    def ask(self, command: str, timeout_s: float, **arguments: Any) -> Any:
        arguments = json.loads(json.dumps(arguments))

        def act() -> Any:
            try:
                return [getattr(self._host, command)(**arguments), None]
            except KeyShardError as exc:
                return [None, told(exc)]

        result, error = json.loads(json.dumps(self._crossed(act, timeout_s)))
        if error is not None:
            raise heard(error)
        return result

    def take(self, taken: Mapping[int, int]) -> list[Delivery]:
        seq = self._seq + 1
        answer, content = self._crossed(
            lambda: self._host.take(seq, dict(taken), TAKE_WAIT_S), LEASE_S
        )
        self._seq = seq
        return unpacked(json.loads(json.dumps(answer["deliveries"])), content)

    def _crossed(self, act: Callable[[], Any], timeout_s: float) -> Any:
        """Let the worker do something, and hear of it."""
        end_s = self._scheduler.now_s + timeout_s
        answers: list[Any] = []
        self._travel()
        if self.answers:
            for _ in range(2 if self._random.random() < REPEATED else 1):
                self._scheduler.spawn(self.process, "question", lambda: answers.append(act()))
        while not answers and not self._noticed_dead and self._scheduler.now_s < end_s:
            self._scheduler.sleep(LOOK_S)
        self._travel()
        if not answers or not self.answers or self._random.random() < LOST:
            raise WorkerUnreachableError(f"{self.name} does not answer.")
        return answers[0]

    @property
    def _noticed_dead(self) -> bool:
        return self.gone or (self.process.dead and self.answers)

    def _travel(self) -> None:
        late = self._random.random() < 0.01
        self._scheduler.sleep(self._random.random() * (0.5 if late else 0.002))

    def kill(self) -> None:
        self._world.end_worker(self)

    def leave(self) -> None:
        if self._leaving is None and self.answers and not self.process.dead:
            self._leaving = self._scheduler.spawn(self.process, "close", self._host.close)

    def end(self, timeout_s: float) -> None:
        if timeout_s:
            self.leave()
        if timeout_s and self._leaving is not None:
            end_s = self._scheduler.now_s + timeout_s
            while not self._leaving.done and self._scheduler.now_s < end_s:
                self._scheduler.sleep(LOOK_S)
        self.kill()


class WorkersWorld(World):
    """A run whose query has its consumers in worker processes."""

    def __init__(self, seed: int, trace_max: int | None = None) -> None:
        super().__init__(seed, *([] if trace_max is None else [trace_max]))
        self.strikes = Random(f"{seed}:workers")
        self._count = self.strikes.choice((1, 2, 2, 3))
        self._workers: dict[Process, list[SimulatedWorker]] = {}
        self._started = 0
        self._struck = False
        """Whether anything has happened to a worker, or to an answer of one."""

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

        return HostedBroker(super().connection(process), start, self._count, OPERATION_TIMEOUT_S)

    def _rightful(self, error: KeyShardError) -> bool:
        # A worker may die while a query starts, or while it gives its ranges back at its end.
        query = self.query
        brief = self.shape.bounded or query is None or query.step is Step.STARTING
        gone = isinstance(error, (BrokerUnavailableError, WorkerUnreachableError))
        return (gone and brief and self._struck) or super()._rightful(error)

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
            if self.strikes.random() < 0.7:
                self.record.note(f"FAULT {worker.name} is killed")
                self.end_worker(worker)
            else:
                self.record.note(f"FAULT {worker.name} is stopped")
                worker.answers = False
                worker.client.freeze()
                self.record.add("crashed", worker=worker.name)
                self.scheduler.kill(worker.process)

    def end_worker(self, worker: SimulatedWorker) -> None:
        """End a worker at once; the broker notices now or later."""
        if worker.gone:
            return
        worker.gone = self._struck = True
        unnoticed = self.strikes.random() < 0.3
        self.network.lose_client(
            worker.client, self.strikes.random() * UNNOTICED_S if unnoticed else 0.0
        )
        self.record.add("crashed", worker=worker.name)
        self.scheduler.kill(worker.process)

    def end(self, process: Process) -> None:
        left = [one for one in self._workers.get(process, ()) if not one.gone]

        def leave() -> None:
            """Their input has ended, or else their lease does."""
            for worker in left:
                worker.leave()
            self.scheduler.sleep(self.strikes.uniform(0.0, LEASE_S))
            for worker in left:
                self.end_worker(worker)

        self.scheduler.spawn(self.process, "input ended", leave)
        super().end(process)
