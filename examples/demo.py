"""Demo: 10 ranges over 5 topic partitions into Spark, while the broker is killed.

Produces messages with sequence numbers, consumes them with a Spark query through keyshard, kills
the broker with SIGKILL meanwhile, and checks every row in the sink. Exit code 0 if all checks pass.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.progress_bar import ProgressBar
from rich.table import Table

from keyshard.broker.admin.rest import PulsarAdmin
from keyshard.core.position.entry import TopicPartition, full_topic_name
from keyshard.core.ring.hash_range import split_ring
from keyshard.errors import BrokerError, KeyShardError
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.file_sink import SinkCheck, committed_files
from keyshard.testing.verify.workloads import Workload, create_partitioned_topic, produce

TOPIC, SUBSCRIPTION, PARTITIONS, RANGES = "orders", "demo", 5, 10
LOAD = Workload(messages=120_000, keys=500, size_bytes=100, entry_messages=4)
ROWS_PER_BATCH = 10_000
KILL_AT = 0.4
"""Share of the rows after which the broker is killed."""
DEADLINE_S = 300.0
REFRESH_S = 0.25


@dataclass
class Demo:
    """State of the demo and its screen."""

    broker: DevBroker
    directory: Path
    check: SinkCheck = field(default_factory=SinkCheck)
    batches: int = 0
    backlog: int | None = None
    status: dict[str, int] = field(default_factory=dict)
    story: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def tell(self, text: str) -> None:
        """Add a line to the log on the screen."""
        self.story.append(f"[dim]{time.monotonic() - self.began:6.1f} s[/dim]  {text}")

    def look(self, admin: PulsarAdmin) -> None:
        """Read what was committed and acknowledged since the last call."""
        sink = committed_files(self.directory / "sink")
        for batch in sorted(sink)[self.batches :]:
            self.check.add(sink[batch], RANGES)
            self.batches += 1
        reports = self.directory / "progress.jsonl"
        if reports.exists():
            lines = [line for line in reports.read_text().splitlines(keepends=True) if "\n" in line]
            self.status = json.loads(lines[-1]) if lines else {}
        try:
            topic = full_topic_name(TOPIC)
            stats = [
                admin.subscription(TopicPartition(topic, partition), SUBSCRIPTION) or {}
                for partition in range(PARTITIONS)
            ]
            self.backlog = sum(int(one.get("msgBacklog", 0)) for one in stats)
        except BrokerError:
            self.backlog = None

    def screen(self) -> RenderableType:
        """Draw the ranges, the totals and the log so far."""
        rows = self.check.rows_of_range
        most = max(rows.values(), default=0) or 1
        table = Table(
            title=f"{PARTITIONS} partitions -> {RANGES} hash ranges -> Spark", expand=True
        )
        table.add_column("range")
        table.add_column("slots")
        table.add_column("rows committed", justify="right")
        table.add_column("", ratio=1)
        for index, hash_range in enumerate(split_ring(RANGES)):
            bar = ProgressBar(total=most, completed=rows[index])
            table.add_row(f"r{index}", str(hash_range), f"{rows[index]:,}", bar)
        backlog = "broker down" if self.backlog is None else f"{self.backlog:,} entries"
        totals = (
            f"[bold]{self.check.rows:,}[/bold] of {LOAD.messages:,} rows in {self.batches} "
            f"committed micro-batches, backlog {backlog}, redeliveries dropped "
            f"{self.status.get('duplicatesDropped', 0):,}"
        )
        return Group(table, totals, *self.story)

    def start_query(self) -> subprocess.Popen[bytes]:
        """Start the Spark query in a separate process, with its output in a file."""
        options = {
            "service.url": self.broker.service_url,
            "admin.url": self.broker.admin_url,
            "topic": TOPIC,
            "subscription": SUBSCRIPTION,
            "parallelism": str(RANGES),
            "startingOffsets": "earliest",
            "maxOffsetsPerTrigger": str(ROWS_PER_BATCH),
            "windowMaxRows": str(3 * ROWS_PER_BATCH),
        }
        command = [sys.executable, "-m", "examples.parquet_query"]
        for name in ("sink", "checkpoint"):
            command += [f"--{name}", str(self.directory / name)]
        command += ["--progress", str(self.directory / "progress.jsonl")]
        for name, value in options.items():
            command += ["--option", f"{name}={value}"]
        with (self.directory / "query.log").open("wb") as log:
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def run(self, live: Live, admin: PulsarAdmin) -> None:
        """Consume everything, and kill the broker once meanwhile."""
        query = self.start_query()
        self.tell("Spark query started")
        killed = False
        deadline = time.monotonic() + DEADLINE_S
        try:
            while self.check.rows < LOAD.messages or self.backlog != 0:
                if query.poll() is not None:
                    tail = (self.directory / "query.log").read_text(errors="replace")[-3000:]
                    raise KeyShardError(f"'The query ended early:\n{tail}'")
                if time.monotonic() > deadline:
                    raise KeyShardError(f"The demo did not finish within {DEADLINE_S:.0f} s.")
                self.look(admin)
                live.update(self.screen())
                if not killed and self.check.rows >= KILL_AT * LOAD.messages:
                    killed = True
                    self.kill_broker(live)
                time.sleep(REFRESH_S)
            self.tell("all rows are committed and acknowledged")
            live.update(self.screen())
        finally:
            query.terminate()
            query.wait(20)

    def kill_broker(self, live: Live) -> None:
        """Kill the broker right after acknowledgements, so that it forgets many of them."""
        self.broker.kill()
        self.backlog = None
        self.tell(
            "[red]broker killed with SIGKILL[/red]; it loses acknowledgements that it has not "
            "stored"
        )
        live.update(self.screen())
        self.broker.restart()
        self.tell("the broker runs again; keyshard drops its redeliveries")


def verdict(console: Console, demo: Demo, sent: dict[str, int]) -> bool:
    """Print the checks; return whether all passed."""
    check = demo.check
    per_range = [check.rows_of_range[index] for index in range(RANGES)]
    dropped = demo.status.get("duplicatesDropped", 0)
    found = check.verdicts(TOPIC, sent)
    judged = ("no loss", "exactly once into the checkpoint", "order per key")
    proofs = [
        (
            "no range without rows",
            min(per_range) > 0,
            f"{min(per_range):,} to {max(per_range):,} rows in each range",
        ),
        *((name, found[name].holds, found[name].message) for name in judged),
        ("acknowledged on checkpoint", demo.backlog == 0, f"backlog {demo.backlog}"),
        ("the broker's death was felt", dropped > 0, f"{dropped:,} redeliveries dropped"),
    ]
    table = Table(title="Checked in the Parquet files that Spark committed")
    for heading in ("promise", "held", "figure"):
        table.add_column(heading)
    for promise, held, figure in proofs:
        table.add_row(promise, "[green]yes[/green]" if held else "[red]NO[/red]", figure)
    console.print(table)
    return all(held for _, held, _ in proofs)


def main() -> int:
    """Run the demo; return 0 if all checks passed."""
    console = Console()
    console.print("[bold]keyshard demo[/bold]: a Pulsar broker and Spark, about 2 minutes.")
    with (
        tempfile.TemporaryDirectory(prefix="keyshard-demo-") as directory,
        DevBroker() as broker,
    ):
        create_partitioned_topic(broker.admin_url, TOPIC, PARTITIONS)
        columns = (TextColumn("producing"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("", total=LOAD.messages)
            report = produce(
                LOAD, broker.service_url, TOPIC, lambda count: bar.advance(task, count)
            )
        demo = Demo(broker, Path(directory))
        with (
            closing(PulsarAdmin(broker.connection)) as admin,
            Live(demo.screen(), console=console, refresh_per_second=4) as live,
        ):
            demo.run(live, admin)
        return 0 if verdict(console, demo, report.per_key) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyShardError as exc:
        sys.exit(str(exc))
    except KeyboardInterrupt:
        sys.exit(130)
