"""Chaos for a query from topic to topic: Pulsar, Spark, Pulsar; the output topic is judged.

1. A broker starts, and all messages are published.
2. The query runs; its driver, JVM, executors and Python workers, the broker and its connections are
   killed in turn. Each run has another number of ranges. With staging, it also has another number
   of Spark partitions behind the shuffle, and perhaps adaptive execution. Without it, these stay:
   Spark repeats a batch with the settings of the new run, so rows would change Spark partitions.
3. When everything is acknowledged, the output topic is read and judged as a history.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import httpx
import psutil

from keyshard.broker.wire.broker import WireBroker
from keyshard.columns.messages import messages_of
from keyshard.config.connection import Connection
from keyshard.core.position.entry import EntryId, full_topic_name
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.checkers import Verdict, check
from keyshard.testing.verify.history import Event
from keyshard.testing.verify.workloads import (
    Workload,
    create_partitioned_topic,
    parse_value,
    produce,
)
from tests.chaos.pipeline_query import TWO_HOSTS
from tests.spark.spark_process import SparkProcess
from tests.support.deadlines import DeadlineError, deadline
from tests.support.tested_pulsar import PULSAR

IN, OUT, SUBSCRIPTION = "chaos-in", "chaos-out", "chaos"
PARTITIONS_IN, PARTITIONS_OUT = 4, 3
KEYS = 300
BATCHES = 60
"""Batches of a whole run, about."""
RANGES = (2, 10)
PROGRESS_S = deadline(300)
"""Longest time without a committed batch, seconds."""
POLL_S = 0.2
MESSAGES_PER_MINUTE = 10_000
LOCAL, EXECUTORS = "local[2,4]", TWO_HOSTS
PROMISES = ("no loss", "order per key", "exactly once into the checkpoint")


class Kind(Enum):
    """Faults."""

    DRIVER_KILLED = "driver killed"
    JVM_KILLED = "JVM killed"
    EXECUTOR_KILLED = "executor killed"
    WORKER_KILLED = "Python worker killed"
    BROKER_KILLED = "broker killed"
    INPUT_UNLOADED = "input topic unloaded"
    OUTPUT_UNLOADED = "output topic unloaded"


@dataclass(frozen=True)
class PipelineReport:
    """The faults of a run and their outcome."""

    staged: bool
    """Whether batches were staged, and divided otherwise in each run."""
    messages: int
    stored: int
    lost: int
    twice: int
    disordered: int
    """Messages that are stored before an earlier one of their key."""
    runs: int
    batches: int
    speculative: int
    """Lines of the logs about attempts that ran at once, or waited for the name of another."""
    seconds: float
    faults: dict[str, int]
    verdicts: list[Verdict]

    @property
    def holds(self) -> bool:
        """Whether each message is stored once, in order per key."""
        return all(one.holds and one.checked for one in self.verdicts) and not (
            self.lost or self.twice or self.disordered or self.stored != self.messages
        )


class PipelineChaos:
    """One run.

    Args:
        directory: Folder of its files.
        seed: Decides the faults.
        messages: Messages to publish.
        say: Called with a line about each event.
        cluster: Master of Spark.
        faults: Kinds to inject; by default, all of them, again and again.
        staged: Whether batches are staged; by default, the seed decides.
    """

    def __init__(
        self,
        directory: Path,
        seed: int,
        messages: int,
        say: Callable[[str], None],
        *,
        cluster: str = EXECUTORS,
        faults: tuple[Kind, ...] | None = None,
        staged: bool | None = None,
    ) -> None:
        self._directory = directory
        self._draw = random.Random(seed)
        self._shuffle = self._draw.randint(2, 6)
        drawn = self._draw.random() < 0.5
        self._staged = drawn if staged is None else staged
        self._load = Workload(messages, KEYS, entry_messages=3)
        self._say = say
        self._cluster = cluster
        self._faults = faults
        self._broker = DevBroker(PULSAR, settings={"brokerDeduplicationEnabled": "true"})
        self._runs: list[SparkProcess] = []
        self._injected: Counter[str] = Counter()
        self._began = time.monotonic()

    def run(self, seconds: float) -> PipelineReport:
        """Publish, inject faults into the query, judge the output topic, and return the report.

        Args:
            seconds: How long faults are injected, at most.

        Raises:
            AssertionError: The query commits nothing any more.
        """
        with self._broker:
            self._publish()
            try:
                self._start()
                for kind in self._kinds():
                    if not self._commits(1) or time.monotonic() > self._began + seconds:
                        break
                    self._inject(kind)
                self._drain()
            finally:
                for run in self._runs:
                    run.stop()
            return self._judge()

    def _kinds(self) -> list[Kind]:
        if self._faults is not None:
            return list(self._faults)
        kinds = [
            one for one in Kind if one is not Kind.EXECUTOR_KILLED or self._cluster == EXECUTORS
        ]
        rounds = [self._draw.sample(kinds, len(kinds)) for _ in range(20)]
        return [kind for one in rounds for kind in one]

    def _publish(self) -> None:
        admin = self._broker.admin_url
        kept = {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}
        url = f"{admin}/admin/v2/namespaces/public/default/retention"
        httpx.post(url, json=kept, timeout=20).raise_for_status()
        for topic, partitions in ((IN, PARTITIONS_IN), (OUT, PARTITIONS_OUT)):
            create_partitioned_topic(admin, topic, partitions)
        self._sent = produce(self._load, self._broker.service_url, IN)
        self._tell(f"{self._sent.sent:,} messages are published")

    def _start(self) -> None:
        ranges, adaptive = self._draw.randint(*RANGES), False
        if self._staged:
            others = [number for number in range(2, 7) if number != self._shuffle]
            self._shuffle, adaptive = self._draw.choice(others), self._draw.random() < 0.5
        options = {
            "cluster": self._cluster,
            "shuffle": str(self._shuffle),
            "adaptive": str(adaptive).lower(),
            "read.topic": IN,
            "read.subscription": SUBSCRIPTION,
            "read.service.url": self._broker.service_url,
            "read.admin.url": self._broker.admin_url,
            "read.parallelism": str(ranges),
            "read.tasksPerBatch": str(ranges),
            "read.startingOffsets": "earliest",
            "read.maxOffsetsPerTrigger": str(max(500, self._load.messages // BATCHES)),
            "write.topic": OUT,
            "write.service.url": self._broker.service_url,
            "write.entryMaxMessages": str(self._draw.choice((3, 20, 1_000))),
            "write.sendTimeoutMillis": "20000",
        }
        if self._staged:
            folder = self._directory / "staged"
            folder.mkdir(exist_ok=True)
            options["write.staging"] = folder.as_uri()
        module = "tests.chaos.pipeline_query"
        self._runs.append(SparkProcess(options, self._directory, len(self._runs), module))
        divided = f"shuffle {self._shuffle}{', adaptive' * adaptive}{', staged' * self._staged}"
        self._tell(f"run {len(self._runs)} with {ranges} ranges, {divided}")

    # -- faults ----------------------------------------------------------------------------------

    def _inject(self, kind: Kind) -> None:
        time.sleep(self._draw.uniform(0.0, 1.5))
        self._tell(kind.value)
        run = self._runs[-1]
        if kind is Kind.BROKER_KILLED:
            self._broker.kill()
            self._broker.restart()
        elif kind in (Kind.INPUT_UNLOADED, Kind.OUTPUT_UNLOADED):
            topic = IN if kind is Kind.INPUT_UNLOADED else OUT
            url = f"{self._broker.admin_url}/admin/v2/persistent/public/default/{topic}/unload"
            with suppress(httpx.TransportError):
                httpx.put(url, timeout=30)
        else:
            victim = self._victim(run, kind)
            if victim is None:
                self._tell("  there is none")
                return
            with suppress(psutil.NoSuchProcess):
                victim.kill()
            if kind in (Kind.DRIVER_KILLED, Kind.JVM_KILLED):
                run.stop()
        self._injected[kind.value] += 1

    def _victim(self, run: SparkProcess, kind: Kind) -> psutil.Process | None:
        def said(process: psutil.Process) -> str:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                return " ".join(process.cmdline())
            return ""

        found = run.processes()
        if kind is Kind.DRIVER_KILLED:
            chosen = found[:1]
        elif kind is Kind.JVM_KILLED:
            chosen = [one for one in found if one.name() == "java" and "SparkSubmit" in said(one)]
        elif kind is Kind.EXECUTOR_KILLED:
            chosen = [one for one in found if "CoarseGrainedExecutorBackend" in said(one)]
        else:
            daemons = [one for one in found if "pyspark.daemon" in said(one)]
            chosen = [one for one in daemons if one.ppid() in {other.pid for other in daemons}]
        return self._draw.choice(chosen) if chosen else None

    # -- waiting ---------------------------------------------------------------------------------

    def _commits(self, more: int) -> bool:
        """Wait for committed batches; whether messages are left then."""
        before, end = self._runs[-1].committed(), time.monotonic() + PROGRESS_S
        while self._runs[-1].committed() < before + more:
            if self._backlog() == 0:
                return False
            self._tend(end)
        return True

    def _drain(self) -> None:
        left, end = -1, 0.0
        while (now := self._backlog()) != 0:
            if now != left:
                left, end = now, time.monotonic() + PROGRESS_S
            self._tend(end)

    def _tend(self, end_s: float) -> None:
        run = self._runs[-1]
        if not run.alive():
            self._tell(f"the query ended: {run.tail().strip().splitlines()[-1:]}")
            run.stop()
            self._start()
        if time.monotonic() > end_s:
            raise DeadlineError(f"nothing is committed any more:\n{run.tail()}")
        time.sleep(POLL_S)

    def _backlog(self) -> int:
        """Messages that are not acknowledged; -1 if the broker does not tell."""
        url = f"{self._broker.admin_url}/admin/v2/persistent/public/default/{IN}/partitioned-stats"
        try:
            stats = httpx.get(url, params={"perPartition": "false"}, timeout=5).json()
            return int(stats["subscriptions"][SUBSCRIPTION]["msgBacklog"])
        except (httpx.TransportError, ValueError, KeyError):
            return -1

    # -- the verdict -----------------------------------------------------------------------------

    def _judge(self) -> PipelineReport:
        topic = full_topic_name(OUT)
        sent = self._sent.per_key
        events = [
            Event(0.0, "sent", topic=topic, key=key, seq=seq)
            for key, count in sent.items()
            for seq in range(count)
        ]
        events.append(Event(1.0, "started", batch=OUT, worker="query"))
        stored = list(self._stored(topic))
        events += stored
        for time_s, kind in ((3.0, "completed"), (4.0, "checkpointed")):
            events.append(Event(time_s, kind, batch=OUT, worker="query"))
        times = Counter((one.key, one.seq) for one in stored)
        newest: dict[str | None, int] = {}
        disordered = 0
        for one in stored:
            assert one.seq is not None
            disordered += one.seq < newest.get(one.key, -1)
            newest[one.key] = max(one.seq, newest.get(one.key, -1))
        wanted = {(key, seq) for key, count in sent.items() for seq in range(count)}
        logs = [run.log.read_text(errors="replace") for run in self._runs]
        return PipelineReport(
            staged=self._staged,
            messages=self._sent.sent,
            stored=len(stored),
            lost=len(wanted - times.keys()),
            twice=sum(count - 1 for count in times.values()),
            disordered=disordered,
            runs=len(self._runs),
            batches=self._runs[-1].committed(),
            speculative=sum(
                log.count("KEYSHARD_PRODUCER_BUSY") + log.count("another attempt succeeded")
                for log in logs
            ),
            seconds=round(time.monotonic() - self._began, 1),
            faults=dict(self._injected),
            verdicts=[one for one in check(events) if one.name in PROMISES],
        )

    def _stored(self, topic: str) -> list[Event]:
        found: list[Event] = []
        with closing(WireBroker(Connection(self._broker.service_url))) as broker:
            for where in broker.partitions(topic):
                reader = broker.reader(where, EntryId(0, 0))
                end_s = time.monotonic() + 120
                while not reader.at_end():
                    if time.monotonic() > end_s:
                        raise TimeoutError(f"{where} could not be read to its end")
                    for block in reader.read(200):
                        for message in messages_of(where, block):
                            key, seq = parse_value(message.value or b"")
                            assert message.key == key
                            found.append(Event(
                                2.0, "delivered", topic=topic, partition=where.partition, key=key,
                                seq=seq, batch=OUT, part=where.partition, worker="query",
                                ledger=message.message_id.ledger, entry=message.message_id.entry,
                                index=message.message_id.batch_index,
                            ))  # fmt: skip
        return found

    def _tell(self, text: str) -> None:
        self._say(f"{time.monotonic() - self._began:6.1f} s  {text}")
