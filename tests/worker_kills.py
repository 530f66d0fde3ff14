"""Kills of workers of a source, on a real broker; the checkers judge.

``python -m tests.proofs worker-kills --workers ray:2 --messages 100000``: while that many
messages come, workers are killed (SIGKILL) and stopped for longer than their lease (SIGSTOP,
SIGCONT), in turn.
"""

from __future__ import annotations

import itertools
import os
import signal
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from keyshard import KeyShardSource, SourceStream
from keyshard.coordinator.coordinator import Coordinator
from keyshard.coordinator.progress import SourceWorker
from keyshard.core.position.entry import full_topic_name
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.checkers import check
from keyshard.testing.verify.history import HistoryWriter, read_history
from keyshard.testing.verify.recorder import Recorder
from keyshard.testing.verify.workloads import Workload, create_partitioned_topic, produce
from keyshard.workers.backends import connect_source
from tests.proofs.runner import Options, Outcome, Outcomes, Proof
from tests.support.deadlines import deadline
from tests.support.tested_pulsar import PULSAR

PARTITIONS = 3
STOPPED_S = 6.0
"""How long a worker is stopped: beyond its lease, seconds."""
WAIT_S = deadline(60)
"""Longest wait for a batch, seconds."""


def run(
    broker: DevBroker, folder: Path, workers: str, load: Workload, every_s: float
) -> tuple[str, bool]:
    """Take all messages while workers are killed; return a report and whether all checks hold."""
    topic = f"workers-{uuid.uuid4().hex[:8]}"
    create_partitioned_topic(broker.admin_url, topic, PARTITIONS)
    source = KeyShardSource(
        topic, subscription="kills", service_url=broker.service_url, admin_url=broker.admin_url,
        starting_position="earliest", workers=workers,
    )  # fmt: skip
    history = folder / "history.jsonl"
    with HistoryWriter(history) as writer:
        recorder = Recorder(writer, "source")
        coordinator = Coordinator(
            source,
            lambda: recorder.broker(
                connect_source(source.how_to_connect(), source.parsed_workers())
            ),
        )
        coordinator.start()
        struck = Struck(lambda: coordinator.status()["sourceWorkers"], every_s)
        publishing = threading.Thread(
            target=lambda: recorder.sent(
                full_topic_name(topic), produce(load, broker.service_url, topic).per_key
            )
        )
        began_s = time.monotonic()
        publishing.start()
        struck.start()
        try:
            _take(SourceStream(coordinator), recorder, load.messages)
            took_s = time.monotonic() - began_s
        finally:
            struck.end()
            publishing.join()
        output = coordinator.status()
        coordinator.stop()
    verdicts = check(list(read_history(history)))
    broken = [verdict for verdict in verdicts if not verdict.holds]
    restarts = sum(one["restarts"] for one in output["sourceWorkers"])
    report = (
        f"{workers}: {load.messages:,} messages in {took_s:.0f} s, {struck.counts['SIGKILL']} "
        f"workers killed, {struck.counts['SIGSTOP']} stopped for {STOPPED_S:.0f} s, {restarts} "
        f"restarts, {output['duplicatesDropped']:,} redeliveries dropped.\n"
        + "\n".join(map(str, verdicts))
    )
    return report, not broken


def _take(stream: SourceStream, recorder: Recorder, messages: int) -> None:
    rows = 0
    while rows < messages:
        batch = stream.next_batch(WAIT_S)
        assert batch is not None, f"{rows} of {messages} rows came"
        rows += sum(part.num_rows for part in recorder.rows(batch))
        recorder.checkpointed(batch)
        stream.commit(batch)


class Struck:
    """Strikes at workers, one after the other, every few seconds.

    Args:
        workers: Returns the workers of the source.
        every_s: Time between two strikes, seconds.
    """

    def __init__(self, workers: Callable[[], Sequence[SourceWorker]], every_s: float) -> None:
        self.counts: Counter[str] = Counter()
        self._workers = workers
        self._every_s = every_s
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin."""
        self._spawn(self._strike)

    def end(self) -> None:
        """End the strikes, and wait until every stopped worker continues."""
        self._ended.set()
        while self._threads:
            self._threads.pop().join()

    def _spawn(self, action: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=action))
        self._threads[-1].start()

    def _strike(self) -> None:
        hows = itertools.cycle((signal.SIGKILL, signal.SIGSTOP))
        for turn in itertools.count():
            if self._ended.wait(self._every_s):
                return
            workers = self._workers()
            pid = workers[turn // 2 % len(workers)]["pid"]
            if pid is None:
                continue
            how = next(hows)
            os.kill(pid, how)
            self.counts[how.name] += 1
            if how is signal.SIGSTOP:
                self._spawn(partial(self._let_go_on, pid))

    def _let_go_on(self, pid: int) -> None:
        self._ended.wait(STOPPED_S)
        with suppress(ProcessLookupError):  # The source has killed it meanwhile.
            os.kill(pid, signal.SIGCONT)


def _outcomes(given: Options, seeds: range) -> Outcomes:
    """Nothing is drawn: a seed is one more run."""
    load = Workload(given.messages, keys=500, entry_messages=4, rate_per_s=given.rate)
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder, DevBroker(PULSAR) as broker:
            report, held = run(broker, Path(folder), given.workers, load, given.every)
        print(report, flush=True)
        yield Outcome(seed, "" if held else "a check fails, see the report")


PROOF = Proof(
    _outcomes, seed_start=0,
    options={
        "--workers": {"default": "processes:2", "help": "of the source (default: processes:2)"},
        "--messages": {"type": int, "default": 100_000, "help": "how many (default: 100000)"},
        "--rate": {"type": float, "default": 2_500.0, "help": "messages per second (2500)"},
        "--every": {"type": float, "default": 4.0, "help": "seconds between two faults (4)"},
    },
)  # fmt: skip
