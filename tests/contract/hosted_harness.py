"""The in-memory broker under the contract, with its consumers behind workers of this process."""

from __future__ import annotations

import json
import os
import threading

from memory_harness import MemoryHarness

from keyshard.broker.hosted.broker import HostedBroker
from keyshard.broker.hosted.host import Host
from keyshard.broker.hosted.process import LOOPBACK, Setup, WorkerServer, at
from keyshard.broker.hosted.worker import LEASE_S, Worker
from keyshard.broker.memory import MemoryBroker
from keyshard.broker.port import Broker
from keyshard.config.connection import Connection

WORKERS = 2
TIMEOUT_S = 10.0
TICK_S = 0.02


class LocalWorker(Worker):
    """A host and its server in this process; asked over loopback, as any other."""

    def __init__(self, broker: Broker, *, keeps: bool = False) -> None:
        self.host = Host(broker, keeps=keeps)
        setup = Setup(Connection("pulsar://nobody"), LEASE_S, level=30)
        self._server = WorkerServer(self.host, setup)
        self._thread = threading.Thread(target=self._server.serve, daemon=True)
        self._thread.start()
        hello = {"endpoint": at(LOOPBACK, self._server.port), "pid": os.getpid(), "host": "here"}
        hello["reading"] = self._server.reading_token
        super().__init__(json.dumps(hello), setup.token, "local worker")

    def kill(self) -> None:
        self._client.close()

    def leave(self) -> None:
        self.host.close()

    def end(self, timeout_s: float) -> None:
        del timeout_s
        self.leave()
        self._server.shutdown()
        self._thread.join(TIMEOUT_S)
        self._client.close()


class HostedHarness(MemoryHarness):
    """All cases of consumers hold for those that workers host."""

    def broker(self) -> Broker:
        def start(_stop: threading.Event) -> LocalWorker:
            self._brokers.append(MemoryBroker(self._cluster))
            return LocalWorker(self._brokers[-1])

        local = super().broker()
        hosted = HostedBroker(local, start, WORKERS, TIMEOUT_S)
        self._hosted.append(hosted)
        return hosted

    def __init__(self) -> None:
        super().__init__()
        self._hosted: list[HostedBroker] = []
        self._ended = threading.Event()
        self._timer = threading.Thread(target=self._tick, daemon=True)
        self._timer.start()

    def _tick(self) -> None:
        """The client's timer: nobody receives from a consumer that has nothing."""
        while not self._ended.wait(TICK_S):
            self._cluster.catch_up()

    def close(self) -> None:
        for broker in self._hosted:
            broker.close()
        self._ended.set()
        self._timer.join(TIMEOUT_S)
        super().close()
