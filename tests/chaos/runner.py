"""Runs a stream or handlers on a real broker under faults, and judges the history of it.

1. A broker, a proxy before it, the publishers and the program start.
2. Rounds of faults until the time is over, one round at least.
3. The faults stop; the program gets the time of ``LIVENESS_S`` to consume everything.
4. The checkers judge the history.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import psutil

from keyshard.config.connection import AUTO
from keyshard.errors import DevBrokerError
from keyshard.testing.verify.history import HistoryWriter, read_history
from keyshard.testing.verify.history_view import HostKind
from tests.chaos.cluster import SUBSCRIPTION, TOPIC, Cluster
from tests.chaos.java_publisher import JavaPublisher, keys_of_bytes, keys_of_text
from tests.chaos.plan import RANGES, Fault, Kind, Subject, faults
from tests.chaos.publisher import Publisher, PublisherFailedError, PythonPublisher
from tests.chaos.report import (
    BROKER,
    LIVENESS_S,
    Report,
    figures,
    forgotten,
    judge,
    unchecked,
    wrongs_of_handlers,
)
from tests.chaos.several import SeveralBrokers
from tests.chaos.stream import WORKER, Settings
from tests.chaos.stream_process import StreamFailedError, StreamProcess, write
from tests.support.deadlines import deadline

FORGOTTEN = "acknowledgements forgotten"
"""A kind of fault that is not injected but found in the history of broker deaths."""

_PROXY = "proxy"
_WORKER_PROCESS = "worker process"
_WAKING_S = 0.5
"""Time that worker processes go on before the program that was stopped with them, seconds."""
_OUTLIVE_S = 10.0
"""Longest time that worker processes may live on after their program, seconds."""
_KEYS = 60
_CHECKPOINTS = 0.75
"""Share of the seeds with a checkpoint for handlers."""
_RATE_PER_S = 120.0
_JAVA_KEYS = 15
"""Number of keys of bytes, and of keys of text."""
_JAVA_RATE_PER_S = 45.0
_PROGRESS_S = deadline(120)
_STEP_S = deadline(30)
_POLL_S = 0.1
_ACKNOWLEDGED_S = 1.5
"""Time in which acknowledgements gather before the broker is killed, seconds."""


class Chaos:
    """One run.

    Args:
        directory: Folder of its files, such as ``history.jsonl``.
        subject: The program.
        seed: Decides the faults and the load.
        say: Called with a line about each event.
        workers: Where the consumers of the program run.
        transport: Client that consumes and reads.
        brokers: Number of brokers; with several there are two bookies, too.
    """

    def __init__(
        self,
        directory: Path,
        subject: Subject,
        seed: int,
        say: Callable[[str], None],
        *,
        workers: str,
        transport: str = AUTO,
        brokers: int = 1,
    ) -> None:
        self._subject = subject
        self._workers = workers
        self._brokers = brokers
        self._transport = transport
        self._strike = random.Random(f"{seed}: which worker?")
        self._seed = seed
        # Without one, messages that the broker forgets are handled again.
        self._checkpoint = random.Random(f"{seed}: keep one?").random() < _CHECKPOINTS
        self._say = say
        self._began = time.monotonic()
        self._injected: Counter[Kind] = Counter()
        self._cluster = (
            Cluster(directory / "broker")
            if brokers == 1
            else SeveralBrokers(directory / "cluster", brokers, seed)
        )
        settings = Settings(
            topic=TOPIC,
            subscription=SUBSCRIPTION,
            service_url=self._cluster.proxied_url,
            admin_url=self._cluster.admin_url,
            ranges=RANGES[1],
            directory=str(directory),
            checkpoint=self._checkpoint,
            workers=workers,
            transport=transport,
        )
        self._history, self._healed = settings.history, settings.healed
        self._stream = StreamProcess(subject.module, settings)
        url = self._cluster.direct_url
        self._of_bytes = keys_of_bytes(seed, _JAVA_KEYS)
        self._publishers: list[Publisher] = [
            PythonPublisher(
                url, TOPIC, [f"k{number}" for number in range(_KEYS)],
                rate_per_s=_RATE_PER_S, seed=seed, log=directory / "publisher.log",
            ),
            JavaPublisher(
                url, TOPIC, self._of_bytes, keys_of_text(_JAVA_KEYS),
                rate_per_s=_JAVA_RATE_PER_S, seed=seed, log=directory / "java-publisher.log",
            ),
        ]  # fmt: skip

    def run(self, minutes: float) -> Report:
        """Run the program under faults, judge its history, and return the report.

        Args:
            minutes: How long faults are injected. The first round is completed in any case.

        Raises:
            DevBrokerError: The broker did not start at all.
        """
        problems: list[str] = []
        with ExitStack() as stack:
            stack.enter_context(self._cluster)
            try:
                self._start(stack)
                self._rounds(60 * minutes)
                self._settle()
            except (
                TimeoutError, StreamFailedError, PublisherFailedError, DevBrokerError
            ) as exc:  # fmt: skip
                problems.append(str(exc))
            with HistoryWriter(self._history) as history:
                for publisher in self._publishers:
                    history.write_all(publisher.confirmed)
        return self._judge(problems)

    @property
    def _kinds(self) -> list[Kind]:
        return self._subject.kinds(self._workers, self._brokers)

    def _rounds(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        for number, drawn in enumerate(
            faults(self._seed, self._subject, self._workers, self._brokers)
        ):
            for fault in drawn:
                if number and time.monotonic() >= end:
                    return
                self._inject(fault)

    # -- before and after the faults --------------------------------------------------------------

    def _start(self, stack: ExitStack) -> None:
        stack.callback(self._stream.close)
        self._stream.start()
        for publisher in self._publishers:
            stack.callback(publisher.close)
            publisher.start()
        self._progress()
        self._tell(f"the {self._subject.value} run, checkpoint: {self._checkpoint}")

    def _settle(self) -> None:
        """Stop publishing, and wait until every message is consumed and acknowledged."""
        end = time.monotonic() + LIVENESS_S
        for publisher in self._publishers:
            publisher.stop(end)
        write(self._history, "faults_stopped")
        self._tell("no more faults")
        self._healed.touch()
        end = time.monotonic() + LIVENESS_S
        self._until(lambda: not self._left(end), LIVENESS_S, "a backlog of 0")
        if self._subject is Subject.HANDLERS:
            # A broker that died forgets that dead letters are done. The next start learns it from
            # their markers, or by its checkpoint.
            self._stream.restart(RANGES[0])
            end = time.monotonic() + LIVENESS_S
            self._until(lambda: not self._cluster.resting(end), LIVENESS_S, "letters that are done")
        if self._workers != "embedded":
            count = int(self._workers.partition(":")[2])
            self._until(
                lambda: len(self._stream.workers()) == count, LIVENESS_S, "all worker processes"
            )
        self._stream.stop()
        _, outlive = psutil.wait_procs(self._stream.all_workers, _OUTLIVE_S)
        if outlive:
            raise TimeoutError(f"worker processes outlive their program: {outlive}")
        left = self._cluster.backlog(end)
        if left:
            raise TimeoutError(f"the backlog is {left} after the end")
        self._tell("everything is consumed")

    def _left(self, end: float) -> int:
        """Messages that are not acknowledged, and keys that are parked."""
        status = self._stream.status()
        return self._cluster.backlog(end) or status.parked or not status.running

    def _judge(self, problems: list[str]) -> Report:
        events = list(read_history(self._history))
        verdicts = judge(events)
        forgot = [entries for entries in forgotten(events) if entries]
        injected = {kind.value: self._injected[kind] for kind in self._kinds}
        injected[FORGOTTEN] = len(forgot)
        total, host = self._stream.total(), HostKind.BATCHES
        whole = not problems  # The run came to its end.
        if total.misrouted:
            problems.append(f"{total.misrouted} messages were said to be misrouted")
        if self._subject is Subject.HANDLERS:
            host = HostKind.HANDLERS
            if whole:
                problems += wrongs_of_handlers(events, checkpoint=self._checkpoint)
        if whole:
            problems += [f"nothing to check: {name}" for name in unchecked(verdicts, host)]
            problems += [f"never injected: {name}" for name, times in injected.items() if not times]
        return Report(
            seed=self._seed,
            subject=self._subject.value,
            workers=self._workers,
            transport=self._transport,
            brokers=self._brokers,
            seconds=round(time.monotonic() - self._began, 1),
            faults=injected,
            verdicts=verdicts,
            unconfirmed=sum(one.refused.total() for one in self._publishers),
            of_bytes=sum(one.key in self._of_bytes for one in events if one.kind == "sent"),
            misrouted=total.misrouted,
            rescales=total.rescales,
            unparked=total.unparked,
            starts=self._stream.starts,
            gave_up=self._stream.gave_up,
            redeliveries_dropped=total.duplicates_dropped,
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
        workers = self._stream.workers() if fault.workers_too else []
        try:
            for one in workers:
                signalled(one, signal.SIGSTOP)
            time.sleep(fault.lasts_s)
        finally:
            for one in workers:
                signalled(one, signal.SIGCONT)
            self._pause(_WAKING_S if workers else 0.0)
            self._stream.thaw()
        write(self._history, "disconnected", WORKER)

    def _kill_worker(self, _fault: Fault) -> None:
        signalled(self._one_worker(), signal.SIGKILL)
        write(self._history, "disconnected", _WORKER_PROCESS)

    def _stop_worker(self, fault: Fault) -> None:
        """Stop a worker process for a while (SIGSTOP), and continue it.

        Beyond its lease, the worker is replaced and killed. If it wakes, it must do nothing.
        """
        worker = self._one_worker()
        signalled(worker, signal.SIGSTOP)
        write(self._history, "disconnected", _WORKER_PROCESS)
        try:
            self._pause(fault.lasts_s)
        finally:
            signalled(worker, signal.SIGCONT)

    def _one_worker(self) -> psutil.Process:
        self._until(self._stream.workers, _PROGRESS_S, "a worker process")
        return self._strike.choice(sorted(self._stream.workers(), key=lambda one: one.pid))

    def _kill_broker(self, _fault: Fault) -> None:
        before = self._stream.total().acknowledged
        self._until(
            lambda: self._stream.total().acknowledged > before, _PROGRESS_S, "acknowledgements"
        )
        self._pause(_ACKNOWLEDGED_S)
        self._cluster.kill()
        write(self._history, "crashed", BROKER)
        self._cluster.start()

    def _stop_broker(self, fault: Fault) -> None:
        self._cluster.freeze()
        try:
            time.sleep(fault.lasts_s)
        finally:
            self._cluster.thaw()
        write(self._history, "disconnected", BROKER)

    def _cut_connections(self, _fault: Fault) -> None:
        self._connected()
        self._cluster.proxy.cut()
        write(self._history, "disconnected", _PROXY)

    def _stall_connections(self, fault: Fault) -> None:
        self._connected()
        self._cluster.proxy.stall()
        try:
            self._pause(fault.lasts_s)
        finally:
            self._cluster.proxy.resume()
        write(self._history, "disconnected", _PROXY)

    def _unload_topic(self, _fault: Fault) -> None:
        self._cluster.unload(time.monotonic() + _PROGRESS_S)
        write(self._history, "disconnected", BROKER)

    def _shut_down_broker(self, _fault: Fault) -> None:
        self._several.shut_down()
        write(self._history, "disconnected", BROKER)
        self._cluster.start()

    def _move_bundle(self, _fault: Fault) -> None:
        self._several.move()
        write(self._history, "disconnected", BROKER)

    def _split_bundle(self, _fault: Fault) -> None:
        self._several.split()
        write(self._history, "disconnected", BROKER)

    def _kill_bookie(self, fault: Fault) -> None:
        self._several.kill_bookie()
        try:
            self._pause(fault.lasts_s)
        finally:
            self._several.start()
        write(self._history, "disconnected", BROKER)

    @property
    def _several(self) -> SeveralBrokers:
        assert isinstance(self._cluster, SeveralBrokers)
        return self._cluster

    def _add_partitions(self, _fault: Fault) -> None:
        end = time.monotonic() + _PROGRESS_S
        grow = partial(self._cluster.grow, end)
        for publisher in self._publishers:
            grow = partial(publisher.reopen, end, grow)
        grow()

    def _restart(self, fault: Fault) -> None:
        self._progress()
        self._stream.restart(fault.ranges)

    def _rescale(self, fault: Fault) -> None:
        self._stream.order(f"RESCALE {fault.ranges}")

    def _unpark(self, _fault: Fault) -> None:
        self._until(lambda: self._stream.status().parked, _PROGRESS_S, "a parked key")
        self._stream.order("UNPARK")

    # -- waiting ----------------------------------------------------------------------------------

    def _progress(self) -> None:
        """Wait until the program has committed two batches from now on."""
        before = self._stream.total().batches
        self._until(
            lambda: self._stream.total().batches >= before + 2, _PROGRESS_S, "committed batches"
        )

    def _connected(self) -> None:
        self._until(lambda: self._cluster.proxy.connections, _PROGRESS_S, "a connection")

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self._until(lambda: time.monotonic() >= end, seconds + _PROGRESS_S, "a pause")

    def _until(self, condition: Callable[[], object], limit_s: float, what: str) -> None:
        """Poll until a condition holds; the program is looked after meanwhile."""
        end = time.monotonic() + limit_s
        while not condition():
            self._stream.tend()
            if self._cluster.tend():
                write(self._history, "disconnected", BROKER)
                self._tell("a bookie or a broker had ended by itself, and was started again")
            if time.monotonic() >= end:
                raise TimeoutError(
                    f"not within {limit_s:.0f} s: {what}. The program: {self._stream.log_tail()}"
                )
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
    Kind.RESTARTED: Chaos._restart,
    Kind.RESCALED: Chaos._rescale,
    Kind.UNPARKED: Chaos._unpark,
    Kind.WORKER_KILLED: Chaos._kill_worker,
    Kind.WORKER_STOPPED: Chaos._stop_worker,
    Kind.BROKER_SHUT_DOWN: Chaos._shut_down_broker,
    Kind.BUNDLE_MOVED: Chaos._move_bundle,
    Kind.BUNDLE_SPLIT: Chaos._split_bundle,
    Kind.BOOKIE_KILLED: Chaos._kill_bookie,
}


def signalled(process: psutil.Process, number: signal.Signals) -> None:
    """Send a signal to who may have ended."""
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def _details(fault: Fault) -> str:
    if fault.kind is Kind.STREAM_KILLED:
        where = "at any time" if fault.step is None else fault.step.value
        return f" ({where}; next with {fault.ranges} ranges)"
    if fault.kind in {Kind.RESTARTED, Kind.RESCALED}:
        return f" ({fault.ranges} ranges)"
    return f" ({fault.lasts_s:.1f} s)" if fault.lasts_s else ""
