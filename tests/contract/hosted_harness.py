"""The in-memory broker under the contract, with its consumers behind workers of this process."""

from __future__ import annotations

import threading

from keyshard.broker.memory import MemoryBroker
from keyshard.broker.port import Broker
from keyshard.workers.broker import RemoteBroker
from tests.contract.memory_harness import MemoryHarness
from tests.support.deadlines import deadline
from tests.support.worker_servers import LocalWorker

WORKERS = 2
TIMEOUT_S = deadline(10)
TICK_S = 0.02


class HostedHarness(MemoryHarness):
    """All cases of consumers hold for those that workers host."""

    def broker(self) -> Broker:
        def start(_stop: threading.Event) -> LocalWorker:
            self._brokers.append(MemoryBroker(self._cluster))
            return LocalWorker(self._brokers[-1])

        local = super().broker()
        hosted = RemoteBroker(local, start, WORKERS, TIMEOUT_S)
        self._hosted.append(hosted)
        return hosted

    def __init__(self) -> None:
        super().__init__()
        self._hosted: list[RemoteBroker] = []
        self._ended = threading.Event()
        self._timer = threading.Thread(target=self._tick, daemon=True)
        self._timer.start()

    def _tick(self) -> None:
        """The client's timer: no thread receives from an empty consumer."""
        while not self._ended.wait(TICK_S):
            self._cluster.catch_up()

    def close(self) -> None:
        for broker in self._hosted:
            broker.close()
        self._ended.set()
        self._timer.join(TIMEOUT_S)
        super().close()
