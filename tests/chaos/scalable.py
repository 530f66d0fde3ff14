"""Chaos for a scalable topic: segments split and merge while the program is killed.

``python -m tests.proofs scalable --messages 200000``:

1. A broker starts, a topic with 1 to 4 segments, and the program.
2. Producers of Java's API V5 publish. A key belongs to one producer; some keys get many messages.
3. Every few seconds until all is published, a segment splits or two merge. Again and again, the
   program is killed and starts with another number of ranges. With ``--broker-kills``, the broker
   is killed in turn with it, half of the times while it changes segments.
4. The program gets time to consume the rest. The checkers judge the history as that of one topic
   partition, so the order of a key holds from a parent to its children.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec

from keyshard.core.topic_segments import SEGMENT, scalable_topic_of
from keyshard.errors import BrokerError
from keyshard.testing.verify.checkers import (
    Verdict,
    ack_after_checkpoint,
    key_order,
    mutual_exclusion,
    rerun_equality,
    routing,
)
from keyshard.testing.verify.history import Event, HistoryWriter, Name, read_history
from keyshard.testing.verify.history_view import HistoryView, HostKind
from tests.chaos import handlers, query_process, stream
from tests.chaos.cluster import SUBSCRIPTION, Cluster
from tests.chaos.java_publisher import V5Publisher
from tests.chaos.pipeline import PROMISES
from tests.chaos.plan import RANGES
from tests.chaos.publisher import RUN
from tests.chaos.query_process import QueryProcess
from tests.chaos.report import BROKER, judge, text_of, unchecked, wrongs_of_handlers
from tests.chaos.stream import Settings
from tests.chaos.stream_process import StreamProcess, write
from tests.proofs.runner import Options, Outcome, Outcomes, Proof, failed
from tests.support.deadlines import deadline, in_time
from tests.support.java_client import JavaClient
from tests.support.machine import Since
from tests.support.scalable_topic import ScalableTopic

SEGMENTS_MAX = 4
"""Most segments of the topic at first."""
PRODUCERS = (2, 4)
KEYS = 60
"""Keys of a producer."""
HOT_KEYS, HOT_TIMES = 3, 20
"""Keys of a producer that come more often than others, and how many times as often."""
BETWEEN_S = (1.0, 4.0)
"""Pause between two changes, seconds."""
CHANGES_PER_KILL = (1, 4)
"""Changes from one kill of the program to the next. The first one follows the first change."""
CHANGE_S = 0.5
"""A change that a kill of the broker interrupts is asked for this long before it, seconds."""
STEP_S = deadline(30)
"""Longest wait for the step at which the program is killed, seconds."""
BATCH_S = deadline(90)
"""The same for the first batch of a query, whose JVM starts first, seconds."""
PROGRESS_S = deadline(120)
"""Longest time without progress, seconds."""
_POLL_S = 0.1
_RERUNS = "re-runs are equal"
_SPREAD = frozenset({"ring covered without overlap", "routed by key"})
"""Checkers of ranges, which each segment has for itself."""
say = partial(print, flush=True)


SUBJECTS: dict[str, Sequence[Enum | None]] = {
    "handlers": [*(one for one in handlers.Step if one is not handlers.Step.PARKED), None],
    "stream": [*stream.Step, None],
    "query": [*query_process.Victim],
}
"""The programs: handlers, an embedded stream, a Spark query; and where each is killed."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The options of a run, drawn or given."""

    subject: str
    messages: int
    rate_per_s: float
    kills: bool
    broker_kills: bool
    batches: bool


@dataclass(frozen=True, slots=True)
class ScalableReport:
    """A run and its outcome."""

    verdicts: list[Verdict]
    problems: list[str]
    figures: dict[str, int]

    @property
    def holds(self) -> bool:
        """Whether every promise was checked and holds."""
        return not self.problems and all(one.holds for one in self.verdicts)


class ScalableChaos:
    """One run.

    Args:
        directory: Folder of its files, such as ``history.jsonl``.
        seed: Decides topic, keys, changes and faults.
        shape: Its options.
        say: Called with a line about each event.
    """

    def __init__(
        self, directory: Path, seed: int, shape: Shape, say: Callable[[str], None]
    ) -> None:
        self._directory = directory
        self._seed = seed
        self._draw = random.Random(seed)
        self._shape = shape
        self._say = say
        self._began = time.monotonic()
        # Only drawn splits and merges: the load causes none.
        settings = {"scalableTopicAutoScaleEnabled": "false"}
        self._cluster = Cluster(directory / "broker", settings, partitions=0)
        self._counts: Counter[str] = Counter()
        self._publishers: list[V5Publisher] = []

    def run(self) -> ScalableReport:
        """Publish, change segments and inject faults; judge, and return the report.

        Raises:
            Exception: The run did not come to its end, and no message was out of order until then.
        """
        error: Exception | None = None
        with ExitStack() as stack:
            stack.enter_context(self._cluster)
            try:
                self._start(stack)
                self._changes()
                self._settle()
            except Exception as exc:  # noqa: BLE001 - raised below, unless a verdict comes first
                error = exc
        if error is not None and not self._publishers:
            raise error
        report = self._judge(whole=error is None)
        if error is not None and report.holds:
            raise error
        return report

    # -- the run -----------------------------------------------------------------------------------

    def _start(self, stack: ExitStack) -> None:
        cluster, draw = self._cluster, self._draw
        segments = draw.randint(1, SEGMENTS_MAX)
        self._topic = stack.enter_context(closing(ScalableTopic(cluster.broker, segments)))
        settings = Settings(
            topic=self._topic.name, subscription=SUBSCRIPTION, service_url=cluster.proxied_url,
            admin_url=cluster.admin_url, ranges=draw.randint(*RANGES),
            directory=str(self._directory),
        )  # fmt: skip
        settings.healed.touch()  # No handler parks a key.
        self._settings = settings
        if self._shape.subject == "query":
            query = QueryProcess(settings, outages=self._shape.broker_kills)
            self._program: QueryProcess | StreamProcess = query
        else:
            self._program = StreamProcess(f"tests.chaos.{self._shape.subject}", settings)
        stack.callback(self._program.close)
        self._program.start()
        # Without a registration, the broker deletes sealed segments.
        self._until(lambda: self._subscription() is not None, PROGRESS_S, "a subscription")
        java = stack.enter_context(
            closing(JavaClient(cluster.direct_url, self._directory / "java.log"))
        )
        producers = draw.randint(*PRODUCERS)
        for number in range(producers):
            keys = [f"p{number}k{key}" for key in range(KEYS)]
            publisher = V5Publisher(
                java, cluster.direct_url, self._topic.name, keys + keys[:HOT_KEYS] * HOT_TIMES,
                rate_per_s=self._shape.rate_per_s / producers, seed=self._seed + number,
                messages_max=RUN * (self._shape.messages // (RUN * producers)),
                batches=self._shape.batches,
            )  # fmt: skip
            self._publishers.append(publisher)
            stack.callback(publisher.close)
            publisher.start()
        self._tell(f"{producers} producers, {segments} segments, {settings.ranges} ranges")

    def _confirmed(self) -> int:
        return sum(len(one.confirmed) for one in self._publishers)

    def _publishes(self) -> bool:
        """Whether messages are still to come."""
        answered = self._confirmed() + sum(one.refused.total() for one in self._publishers)
        return answered < sum(one.messages_max or 0 for one in self._publishers)

    def _changes(self) -> None:
        """Change segments until everything is published; kill program and broker now and then."""
        draw = self._draw
        kills = [
            *([self._kill_program] if self._shape.kills else ()),
            *([self._kill_broker] if self._shape.broker_kills else ()),
        ]
        left, turn = 1, 0
        while self._publishes():
            self._pause(draw.uniform(*BETWEEN_S))
            began_s = time.monotonic()
            self._change()
            took_s = time.monotonic() - began_s
            change = self._topic.changes[-1]
            self._tell(f"{change}, in {took_s:.1f} s; {self._confirmed():,} messages")
            left -= 1
            if kills and not left:
                left = draw.randint(*CHANGES_PER_KILL)
                self._pause(draw.uniform(0.0, 1.0))
                kills[turn % len(kills)]()
                turn += 1

    def _change(self) -> None:
        """Split or merge; ask again while the broker refuses it after its restart."""
        end_s = time.monotonic() + PROGRESS_S
        while (refusal := self._refused_change(self._draw)) is not None:
            self._counts["changes refused"] += 1
            self._tend(end_s, f"a change of segments: {refusal}")

    def _refused_change(self, draw: random.Random) -> Exception | None:
        """Split or merge; return why the broker refused it."""
        try:
            self._topic.change(draw)
        except (httpx.HTTPError, BrokerError) as exc:
            return exc
        return None

    def _kill_program(self) -> None:
        step = self._draw.choice(SUBJECTS[self._shape.subject])
        ranges = self._draw.randint(*RANGES)
        reached = self._program.kill_at(step, BATCH_S if self._shape.subject == "query" else STEP_S)
        self._counts["kills"] += 1
        self._counts["kills at their step"] += reached
        where = "at any time" if step is None else step.value
        self._tell(f"program killed: {where}; next with {ranges} ranges")
        self._program.start(ranges)

    def _kill_broker(self) -> None:
        """Kill the broker, perhaps while it changes segments, and start it again."""
        changing = None
        if self._draw.random() < 0.5:
            draw = random.Random(self._draw.random())
            changing = threading.Thread(target=self._refused_change, args=[draw])
            changing.start()
            time.sleep(self._draw.uniform(0.0, CHANGE_S))
        self._cluster.kill()
        write(self._settings.history, "crashed", BROKER)
        self._counts["broker kills"] += 1
        self._tell(f"broker killed{', during a change' if changing else ''}")
        self._cluster.start()
        if changing:
            changing.join()
        self._tell("the broker is back")

    def _settle(self) -> None:
        """Stop publishing, and wait until every message is consumed and acknowledged."""
        for publisher in self._publishers:
            publisher.stop(time.monotonic() + PROGRESS_S)
        write(self._settings.history, "faults_stopped")
        self._tell(f"{self._confirmed():,} messages are published")
        left, end_s = -1, 0.0
        while (now := self._backlog()) or not self._program.status().running:
            if now != left:
                left, end_s = now, time.monotonic() + PROGRESS_S
            self._tend(end_s, f"a backlog below {left}")
        self._program.stop()
        metadata = self._ask("").json()
        self._counts["segments"] = metadata["nextSegmentId"]
        self._counts["segments deleted"] = metadata["nextSegmentId"] - len(metadata["segments"])
        self._tell("everything is consumed")

    def _backlog(self) -> int:
        """Unacknowledged entries in all segments."""
        found = self._subscription()
        return -1 if found is None else int(found["msgBacklog"])

    def _subscription(self) -> dict[str, Any] | None:
        found: dict[str, Any] = self._ask("/stats").json()["subscriptions"]
        return found.get(SUBSCRIPTION)

    def _ask(self, path: str) -> httpx.Response:
        return self._cluster.ask("GET", self._topic.path + path, time.monotonic() + PROGRESS_S)

    def _pause(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        self._until(lambda: time.monotonic() >= end_s, seconds + PROGRESS_S, "a pause")

    def _until(self, condition: Callable[[], object], limit_s: float, what: str) -> None:
        end_s = time.monotonic() + limit_s
        while not condition():
            self._tend(end_s, what)

    def _tend(self, end_s: float, what: str) -> None:
        self._program.tend()
        in_time(end_s, f"not in time: {what}. The program: {self._program.log_tail()}")
        time.sleep(_POLL_S)

    def _tell(self, text: str) -> None:
        self._say(f"{time.monotonic() - self._began:6.1f} s  {text}")

    # -- the verdict -------------------------------------------------------------------------------

    def _judge(self, *, whole: bool) -> ScalableReport:
        """Judge the history.

        Args:
            whole: Whether the run came to its end. Before that, messages may be missing.
        """
        with HistoryWriter(self._settings.history) as history:
            for publisher in self._publishers:
                history.write_all(publisher.confirmed)
        events = list(read_history(self._settings.history))
        one_topic = HistoryView(list(of_one_topic(events)))
        total = self._program.total()
        problems = []
        refused = sum((one.refused for one in self._publishers), Counter[str]())
        if refused and not self._shape.broker_kills:
            problems.append(f"refused: {dict(refused)}")
        if total.misrouted:
            problems.append(f"{total.misrouted} messages were said to be misrouted")
        if not whole:
            checkers = (key_order, rerun_equality, mutual_exclusion, ack_after_checkpoint)
            return ScalableReport([check(one_topic) for check in checkers], problems, {})
        verdicts = [one for one in judge(one_topic) if one.name not in _SPREAD]
        if self._shape.subject == "handlers":
            problems += wrongs_of_handlers(one_topic, checkpoint=True)
        problems += [f"nothing to check: {name}" for name in self._unchecked(verdicts)]
        changes = Counter(change.partition(" ")[0] for change in self._topic.changes)
        figures = {
            "messages": len(one_topic.sent),
            "messages refused": refused.total(),
            "splits": changes["split"],
            "merges": changes["merge"],
            "starts": self._program.starts,
            "gave up": self._program.gave_up,
            "segments waiting at most": total.segments_waiting,
            "ms pause of a key at most": round(1_000 * longest_pause_s(events)),
            **self._counts,
        }
        return ScalableReport([*verdicts, routing(events)], problems, figures)

    def _unchecked(self, verdicts: Sequence[Verdict]) -> list[str]:
        """Return the checkers that had nothing to check and should have."""
        if self._shape.subject == "query":
            return [one.name for one in verdicts if one.name in PROMISES and not one.checked]
        handles = self._shape.subject == "handlers"
        names = unchecked(verdicts, HostKind.HANDLERS if handles else HostKind.BATCHES)
        return [name for name in names if name != _RERUNS]  # A kill may hit no batch that has rows.


def of_one_topic(events: Sequence[Event]) -> Iterator[Event]:
    """Yield the events of messages, with the topic instead of the segment; drop those of ranges."""
    for event in events:
        if event.kind in {"range_gained", "range_lost"}:
            continue
        if event.topic is None or not event.topic.startswith(SEGMENT):
            yield event
        else:
            topic = scalable_topic_of(event.topic)
            yield msgspec.structs.replace(event, topic=topic, partition=-1, range=None)


def longest_pause_s(events: Sequence[Event]) -> float:
    """Return how long the first message of a key in a segment waited at most, in seconds.

    It waited from its confirmation until user code got it.
    """
    sent = {event.message[1:]: event.t for event in events if event.kind == "sent"}
    seen: set[Name] = set()
    longest_s = 0.0
    for event in HistoryView(events).seen:
        if event.key is None or (event.topic, event.key) in seen:
            continue
        seen.add((event.topic, event.key))
        longest_s = max(longest_s, event.t - sent.get(event.message[1:], event.t))
    return longest_s


def _outcomes(given: Options, seeds: range) -> Outcomes:
    for seed in seeds:
        options = drawn(seed, given.subject, given.batches)
        shape = Shape(
            options["subject"], given.messages, given.rate, given.kills, given.broker_kills,
            options["batches"] == "on",
        )  # fmt: skip
        yield replace(_outcome(seed, shape), options=options)


def drawn(seed: int, subject: str | None, batches: str | None) -> dict[str, str]:
    """Return the options that a seed decides, unless they are given."""
    return {
        "subject": subject or random.Random(f"{seed}: subject?").choice([*SUBJECTS]),
        "batches": batches or random.Random(f"{seed}: batches?").choice(["on", "on", "off"]),
    }


def _outcome(seed: int, shape: Shape) -> Outcome:
    directory = Path(tempfile.mkdtemp(prefix="keyshard-scalable-"))
    say(f"seed {seed}, {shape.subject}, files in {directory}")
    since = Since()
    try:
        report = ScalableChaos(directory, seed, shape, say).run()
    except Exception as exc:  # noqa: BLE001 - each error fails its seed
        return failed(seed, exc, since)
    say(text_of(report.verdicts, report.problems))
    figures = Counter(report.figures)
    if not report.holds:
        return Outcome(seed, "a check fails, see the lines above", counts=figures)
    shutil.rmtree(directory)
    return Outcome(seed, counts=figures)


PROOF = Proof(
    _outcomes,
    options={
        "--messages": {"type": int, "default": 200_000, "help": "of one seed (200000)"},
        "--rate": {"type": float, "default": 1_000.0, "help": "messages per second (1000)"},
        "--subject": {
            "choices": [*SUBJECTS],
            "help": "the program (default: decided by the seed)",
        },
        "--batches": {
            "choices": ("on", "off"),
            "help": "whether producers batch messages of other keys (default: decided by the seed)",
        },
        "--broker-kills": {"action": "store_true", "help": "kill the broker, too"},
        "--no-kills": {
            "dest": "kills", "action": "store_false", "help": "never kill the program"
        },
    },
)  # fmt: skip
