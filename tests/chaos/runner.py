"""Runs a stream on a real broker under faults, and judges the history of it.

1. A broker, a proxy before it, a publisher and the stream start.
2. Rounds of faults until the time is over, one round at least.
3. The faults stop; the stream gets the time of ``LIVENESS_S`` to consume everything.
4. The checkers judge the history.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from keyshard.devbroker import DevBroker
from keyshard.devbroker.ports import LOOPBACK, free_port
from keyshard.errors import DevBrokerError
from keyshard.verify.history import HistoryWriter, read_history
from keyshard.verify.workloads import create_partitioned_topic
from tests.chaos.plan import KEEP_ALIVE_S, PARTITIONS, RANGES, Fault, Kind, faults
from tests.chaos.proxy import TcpProxy
from tests.chaos.publisher import Publisher
from tests.chaos.report import BROKER, LIVENESS_S, Report, figures, forgotten, judge, unchecked
from tests.chaos.stream import Settings
from tests.chaos.stream_process import StreamFailedError, StreamProcess, write

TOPIC = "persistent://public/default/chaos"
SUBSCRIPTION = "chaos"
FORGOTTEN = "acknowledgements forgotten"
"""A kind of fault that is not injected but found in the history of broker deaths."""

_KEYS = 60
_RATE_PER_S = 150.0
_START_S = 150.0
_PROGRESS_S = 120.0
_STEP_S = 30.0
_POLL_S = 0.1
_ACKNOWLEDGED_S = 1.5
"""Time in which acknowledgements gather before the broker is killed, seconds."""

Say = Callable[[str], None]


class ChaosError(Exception):
    """The run could not be completed: something did not come before its deadline."""


class Chaos:
    """One run.

    Args:
        directory: Where its files are; ``history.jsonl`` among them.
        seed: Decides the faults and the load.
        say: Told what happens.
    """

    def __init__(self, directory: Path, seed: int, say: Say) -> None:
        self._directory = directory
        self._history = directory / "history.jsonl"
        self._seed = seed
        self._say = say
        self._began = time.monotonic()
        self._injected: Counter[Kind] = Counter()
        self._partitions = PARTITIONS

    def run(self, minutes: float) -> Report:
        """Everything; returns the report.

        Args:
            minutes: How long faults are injected. The first round is completed in any case.
        """
        problems: list[str] = []
        with ExitStack() as stack:
            try:
                self._start(stack)
                self._rounds(60 * minutes)
                self._settle()
            except (ChaosError, StreamFailedError) as exc:
                problems.append(str(exc))
            with HistoryWriter(self._history) as history:
                history.write_all(self._publisher.confirmed)
        return self._judge(problems)

    def _rounds(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        for number, drawn in enumerate(faults(self._seed)):
            for fault in drawn:
                if number and time.monotonic() >= end:
                    return
                self._inject(fault)

    # -- before and after the faults --------------------------------------------------------------

    def _start(self, stack: ExitStack) -> None:
        direct = free_port()
        behind = free_port({direct})
        proxied = free_port({direct, behind})
        # Who comes in through the proxy is told the proxy's address by every lookup.
        listeners = {"direct": direct, "proxied": proxied}
        self._broker = stack.enter_context(
            DevBroker(
                port=direct,
                settings={
                    "advertisedAddress": "",
                    "advertisedListeners": ",".join(
                        f"{name}:pulsar://{LOOPBACK}:{port}" for name, port in listeners.items()
                    ),
                    "internalListenerName": "direct",
                    "bindAddresses": f"proxied:pulsar://{LOOPBACK}:{behind}",
                    "brokerDeduplicationEnabled": "true",
                    "keepAliveIntervalSeconds": str(KEEP_ALIVE_S),
                    # The broker writes acknowledgements down every 50 s instead of every 10 s, so
                    # that each of its deaths forgets some.
                    "managedLedgerDefaultMarkDeleteRateLimit": "0.02",
                },
            )
        )
        self._proxy = stack.enter_context(TcpProxy(proxied, behind))
        self._admin = stack.enter_context(
            httpx.Client(base_url=self._broker.admin_url, timeout=20, trust_env=False)
        )
        create_partitioned_topic(self._broker.admin_url, TOPIC, PARTITIONS)
        self._stream = StreamProcess(
            self._directory,
            Settings(
                topic=TOPIC,
                subscription=SUBSCRIPTION,
                service_url=f"pulsar://{LOOPBACK}:{proxied}",
                admin_url=self._broker.admin_url,
                ranges=RANGES[1],
                state=str(self._directory / "checkpoint.json"),
                status="",
                history=str(self._history),
            ),
        )
        stack.callback(self._stream.close)
        self._stream.start()
        self._publisher = Publisher(
            self._broker.service_url,
            TOPIC,
            keys=_KEYS,
            rate_per_s=_RATE_PER_S,
            seed=self._seed,
            log=self._directory / "publisher.log",
        )
        stack.callback(self._publisher.close)
        self._publisher.start()
        self._progress()
        self._tell("the stream runs")

    def _settle(self) -> None:
        """Everything that was published is consumed and acknowledged."""
        with _in_time("the broker's confirmations"):
            self._publisher.stop(time.monotonic() + LIVENESS_S)
        write(self._history, "faults_stopped")
        self._tell("no more faults")
        self._until(lambda: self._backlog() == 0, LIVENESS_S, "a backlog of 0")
        self._stream.stop()
        left = self._backlog()
        if left:
            raise ChaosError(f"the backlog is {left} after the end")
        self._tell("everything is consumed")

    def _judge(self, problems: list[str]) -> Report:
        events = list(read_history(self._history))
        verdicts = judge(events)
        forgot = [entries for entries in forgotten(events) if entries]
        injected = {kind.value: self._injected[kind] for kind in Kind} | {FORGOTTEN: len(forgot)}
        problems += [f"nothing to check: {name}" for name in unchecked(verdicts)]
        problems += [f"never injected: {name}" for name, times in injected.items() if not times]
        return Report(
            seed=self._seed,
            seconds=round(time.monotonic() - self._began, 1),
            faults=injected,
            verdicts=verdicts,
            starts=self._stream.starts,
            gave_up=self._stream.gave_up,
            redeliveries_dropped=self._stream.total().duplicates_dropped,
            problems=problems,
            **figures(events),
        )

    # -- faults -----------------------------------------------------------------------------------

    def _inject(self, fault: Fault) -> None:
        if fault.after_s is None or fault.kind in {Kind.BROKER_KILLED, Kind.STREAM_KILLED}:
            self._progress()
        self._pause(fault.after_s or 0.0)
        self._tell(f"{fault.kind.value}{_details(fault)}")
        _INJECT[fault.kind](self, fault)
        self._injected[fault.kind] += 1

    def _kill_stream(self, fault: Fault) -> None:
        if not self._stream.kill_at(fault.step, _STEP_S) and fault.step is not None:
            self._tell("  it did not come to that step in time, and was killed elsewhere")
        self._stream.start(fault.ranges)

    def _stop_stream(self, fault: Fault) -> None:
        self._stream.freeze()
        try:
            time.sleep(fault.lasts_s)
        finally:
            self._stream.thaw()
        write(self._history, "disconnected", "stream")

    def _kill_broker(self, _fault: Fault) -> None:
        before = self._stream.total().acknowledged
        self._until(
            lambda: self._stream.total().acknowledged > before, _PROGRESS_S, "acknowledgements"
        )
        self._pause(_ACKNOWLEDGED_S)
        self._broker.kill()
        write(self._history, "crashed", BROKER)
        try:
            self._broker.start(_START_S)
        except DevBrokerError as exc:
            raise ChaosError(str(exc)) from exc

    def _stop_broker(self, fault: Fault) -> None:
        group = self._broker.pid
        assert group is not None
        os.killpg(group, signal.SIGSTOP)
        try:
            time.sleep(fault.lasts_s)
        finally:
            os.killpg(group, signal.SIGCONT)
        write(self._history, "disconnected", BROKER)

    def _cut_connections(self, _fault: Fault) -> None:
        self._until(lambda: self._proxy.connections, _PROGRESS_S, "a connection")
        self._proxy.cut()
        write(self._history, "disconnected", "proxy")

    def _stall_connections(self, fault: Fault) -> None:
        self._until(lambda: self._proxy.connections, _PROGRESS_S, "a connection")
        self._proxy.stall()
        try:
            self._pause(fault.lasts_s)
        finally:
            self._proxy.resume()
        write(self._history, "disconnected", "proxy")

    def _unload_topic(self, _fault: Fault) -> None:
        self._ask("PUT", f"{_path(TOPIC)}/unload")
        write(self._history, "disconnected", BROKER)

    def _add_partitions(self, _fault: Fault) -> None:
        self._partitions += 1

        def grow() -> None:
            self._ask("POST", f"{_path(TOPIC)}/partitions", self._partitions)

        with _in_time("the broker's confirmations"):
            self._publisher.reopen(time.monotonic() + _PROGRESS_S, grow)

    # -- waiting ----------------------------------------------------------------------------------

    def _progress(self) -> None:
        """Wait until the stream has committed two batches from now on."""
        before = self._stream.total().batches
        self._until(
            lambda: self._stream.total().batches >= before + 2, _PROGRESS_S, "committed batches"
        )

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self._until(lambda: time.monotonic() >= end, seconds + 1, "a pause")

    def _until(self, condition: Callable[[], object], limit_s: float, what: str) -> None:
        """Poll until a condition holds; the stream is looked after meanwhile."""
        end = time.monotonic() + limit_s
        while not condition():
            self._stream.tend()
            if time.monotonic() >= end:
                raise ChaosError(
                    f"not within {limit_s:.0f} s: {what}. The stream: {self._stream.log_tail()}"
                )
            time.sleep(_POLL_S)

    def _backlog(self) -> int:
        backlog = 0
        for number in range(self._partitions):
            path = f"{_path(TOPIC)}-partition-{number}/stats"
            stats = self._ask("GET", f"{path}?getPreciseBacklog=true").json()
            of_stream = stats["subscriptions"].get(SUBSCRIPTION)
            # Without a subscription yet, everything in the partition is still to come.
            backlog += of_stream["msgBacklog"] if of_stream else 1
        return backlog

    def _ask(self, method: str, path: str, body: object = None) -> httpx.Response:
        """One request; repeated while the broker is busy with the fault before."""
        end = time.monotonic() + _PROGRESS_S
        while True:
            try:
                return self._admin.request(method, path, json=body).raise_for_status()
            except httpx.HTTPError as exc:
                if time.monotonic() >= end:
                    raise ChaosError(f"{method} {path} is refused: {exc}") from exc
            time.sleep(_POLL_S)

    def _tell(self, text: str) -> None:
        self._say(f"{time.monotonic() - self._began:6.1f} s  {text}")


_INJECT: dict[Kind, Callable[[Chaos, Fault], None]] = {
    Kind.STREAM_KILLED: Chaos._kill_stream,
    Kind.STREAM_STOPPED: Chaos._stop_stream,
    Kind.BROKER_KILLED: Chaos._kill_broker,
    Kind.BROKER_STOPPED: Chaos._stop_broker,
    Kind.CONNECTIONS_CUT: Chaos._cut_connections,
    Kind.CONNECTIONS_STALLED: Chaos._stall_connections,
    Kind.TOPIC_UNLOADED: Chaos._unload_topic,
    Kind.PARTITIONS_ADDED: Chaos._add_partitions,
}


@contextmanager
def _in_time(what: str) -> Iterator[None]:
    try:
        yield
    except TimeoutError as exc:
        raise ChaosError(f"{what}: {exc}") from exc


def _details(fault: Fault) -> str:
    if fault.kind is Kind.STREAM_KILLED:
        where = "at any time" if fault.step is None else fault.step.value
        return f" ({where}; next with {fault.ranges} ranges)"
    return f" ({fault.lasts_s:.1f} s)" if fault.lasts_s else ""


def _path(topic: str) -> str:
    return f"/admin/v2/{topic.replace('://', '/')}"
