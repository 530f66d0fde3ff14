"""Kills of actors and of the driver, on a real Ray and a real broker; the checkers judge.

``python -m tests.ray.kills`` kills 3 drivers and 9 actors over 100,000 messages, and fails after 8
minutes. Its options set these numbers.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import ray

from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import EntryId, TopicPartition, full_topic_name
from keyshard.core.topic_segments import is_scalable
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.checkers import check
from keyshard.testing.verify.history import Event, HistoryWriter, read_history
from keyshard.testing.verify.recorder import sent_events
from keyshard.testing.verify.workloads import Workload, create_partitioned_topic, produce
from tests.chaos.scalable import of_one_topic
from tests.helpers import wait_until
from tests.support.deadlines import deadline, in_time
from tests.support.tested_pulsar import PULSAR

ROOT = Path(__file__).parents[2]
PARTITIONS = 3
LOOK_S = 0.02


@dataclass
class Kills:
    """One topic, its drivers one after the other, and their results.

    Args:
        broker: A running broker.
        folder: Folder for files.
        messages: Number of messages.
        deadline_s: Longest time for everything, seconds.
    """

    broker: DevBroker
    folder: Path
    messages: int
    deadline_s: float
    topic: str = field(default_factory=lambda: f"kills-{uuid.uuid4().hex[:8]}")
    options: Sequence[str] = ()
    """More arguments of each driver."""
    durable: list[tuple[int, Checkpoint]] = field(default_factory=list)
    """Lines that were there, and the checkpoint, after each death of a driver."""
    actors_killed: int = 0
    actors_outlived_s: float = 0.0
    """Longest time that actors outlived their driver, seconds."""

    def __post_init__(self) -> None:
        self.sent = self.publish()
        self.out = self.folder / "out.txt"
        self.out.touch()
        self.checkpoint = self.folder / "checkpoint.json"
        self.history = self.folder / "history.jsonl"
        self.writer = HistoryWriter(self.history)
        name = self.topic if is_scalable(self.topic) else full_topic_name(self.topic)
        self.writer.write_all(sent_events(name, self.sent, time.time()))
        self.end_s = time.monotonic() + self.deadline_s

    def publish(self) -> Mapping[str, int]:
        """Publish the messages to a new topic; return their number for each key."""
        create_partitioned_topic(self.broker.admin_url, self.topic, PARTITIONS)
        load = Workload(self.messages, keys=max(50, self.messages // 200), entry_messages=2)
        return produce(load, self.broker.service_url, self.topic).per_key

    def run(self, driver_kills: int, actor_kills: int) -> None:
        """Kill at even distances, until everything has come."""
        apart = actor_kills // (driver_kills + 1)
        kills = (["actor"] * apart + ["driver"]) * driver_kills
        kills += ["actor"] * (actor_kills - apart * driver_kills)
        step = self.messages // (len(kills) + 1)
        process = self.start(2)
        for number, kind in enumerate(kills, start=1):
            self._wait(process, number * step)
            if kind == "actor":
                self._kill_actor()
            else:
                process.kill()
                process.wait()
                self._wait_for_end_of_actors()
                self.writer.write(Event(time.time(), "crashed"))
                if self.checkpoint.exists():
                    text = self.checkpoint.read_text()
                    self.durable.append((self.lines(), Checkpoint.from_json(text)))
                process = self.start(2 + number % 2)
        self._wait(process, self.messages)
        process.send_signal(signal.SIGTERM)
        process.wait(deadline(60))
        self.writer.close()

    def lines(self) -> int:
        """Return the number of results until now."""
        return self.out.read_bytes().count(b"\n")

    def broken(self) -> list[str]:
        """Return the broken promises."""
        events = list(of_one_topic(list(read_history(self.history))))
        broken = [str(one) for one in check(events) if not one.holds]
        results = [line.split() for line in self.out.read_text().splitlines()]
        first: dict[str, list[int]] = {}
        seen: set[tuple[str, ...]] = set()
        for result in results:
            if tuple(result) not in seen:
                first.setdefault(result[3], []).append(int(result[4]))
                seen.add(tuple(result))
        if first != {key: list(range(count)) for key, count in self.sent.items()}:
            broken.append("results are missing, or come out of order for the first time")
        for lines, checkpoint in self.durable:
            for result in results[lines:]:
                where = TopicPartition.parse(result[0])
                state = checkpoint.partitions.get(where)
                if state and state.covers(EntryId(int(result[1]), int(result[2]))):
                    broken.append(f"{result} was in the checkpoint and came again")
        return broken

    def report(self) -> str:
        """Return the counts of messages, kills and results, and the verdicts of the checkers."""
        events = list(read_history(self.history))
        completed = Counter(event.message for event in events if event.kind == "completed")
        verdicts = "; ".join(str(verdict) for verdict in check(events))
        return (
            f"{self.messages:,} messages, {len(self.durable)} drivers and {self.actors_killed} "
            f"actors killed. Actors outlived a driver by {self.actors_outlived_s:.2f} s at most. "
            f"Handled {completed.total():,} times, results taken {self.lines():,} times. {verdicts}"
        )

    def start(self, actors: int, *more: str) -> subprocess.Popen[bytes]:
        """Start a driver, with more arguments of its own."""
        address = ray.get_runtime_context().gcs_address
        with (self.folder / "driver.txt").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.ray.driver", "--address", address,
                 "--service-url", self.broker.service_url, "--topic", self.topic,
                 "--history", str(self.history), "--out", str(self.out),
                 "--checkpoint", str(self.checkpoint), "--actors", str(actors),
                 *self.options, *more],
                cwd=ROOT, stdout=log, stderr=log,
            )  # fmt: skip

    def _wait(self, process: subprocess.Popen[bytes], count: int) -> None:
        """Wait for a number of different results."""
        while True:
            lines = self.out.read_bytes().splitlines()
            if len(lines) >= count and len(set(lines)) >= count:
                return
            text = (self.folder / "driver.txt").read_text()
            assert process.poll() is None, text
            in_time(self.end_s, f"{len(lines)} lines, {text}")
            time.sleep(LOOK_S)

    def _wait_for_end_of_actors(self) -> None:
        """Wait for the end of the actors. Ray ends them some time after their driver."""
        began_s = time.monotonic()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in self._actors()))
        self.actors_outlived_s = max(self.actors_outlived_s, time.monotonic() - began_s)

    def _actors(self) -> list[int]:
        """Processes of actors that wrote lately, the last one last."""
        with self.history.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 200_000))
            pids = re.findall(rb'"worker":"actor (\d+)"', file.read())
        return list(map(int, pids))

    def _kill_actor(self) -> None:
        pid = self._actors()[-1]
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.actors_killed += 1
        self.writer.write(Event(time.time(), "crashed", worker=f"actor {pid}"))


def main() -> int:
    """Kill, and judge."""
    parser = argparse.ArgumentParser(prog="python -m tests.ray.kills", description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--drivers", type=int, default=3)
    parser.add_argument("--actors", type=int, default=9)
    parser.add_argument("--minutes", type=float, default=8.0)
    arguments = parser.parse_args()
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder, DevBroker(PULSAR) as broker:
        kills = Kills(broker, Path(folder), arguments.messages, arguments.minutes * 60)
        kills.run(arguments.drivers, arguments.actors)
        broken = kills.broken()
        print(kills.report())
    print("\n".join(broken[:20]) or "everything held")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
