"""A Spark query from a topic to Parquet files, as a program that chaos kills and starts again."""

from __future__ import annotations

import time
from enum import Enum
from pathlib import Path

from keyshard.testing.verify.file_sink import committed_files, rows_of
from keyshard.testing.verify.history import Event, HistoryWriter
from tests.chaos.stream import Settings, Status
from tests.chaos.stream_process import StreamFailedError
from tests.spark.spark_process import GONE_S, SparkProcess

POLL_S = 0.1


class Victim(Enum):
    """The process of a query that is killed; all others must end with it."""

    DRIVER = "the driver"
    JVM = "the JVM"


class QueryProcess:
    """One run of the query after the other, on the same checkpoint and sink.

    Args:
        settings: Of all runs, beside the number of ranges.
        outages: Whether a query may end because the broker is away.
    """

    def __init__(self, settings: Settings, *, outages: bool) -> None:
        self._settings = settings
        self._outages = outages
        self._ranges = settings.ranges
        self._runs: list[SparkProcess] = []
        self.gave_up = 0
        """Times that it ended because the broker was away."""

    @property
    def starts(self) -> int:
        """Times that it was started."""
        return len(self._runs)

    def start(self, ranges: int | None = None) -> None:
        """Start it; ``ranges``: its number of ranges from now on."""
        self._ranges = ranges or self._ranges
        options = {
            "topic": self._settings.topic,
            "subscription": self._settings.subscription,
            "service.url": self._settings.service_url,
            "admin.url": self._settings.admin_url,
            "parallelism": str(self._ranges),
            "startingOffsets": "earliest",
            "partitionDiscoveryIntervalMillis": "1000",
        }
        self._runs.append(SparkProcess(options, Path(self._settings.directory), len(self._runs)))

    def status(self) -> Status:
        """Whether it runs."""
        return Status(running=self._runs[-1].alive())

    def total(self) -> Status:
        """The counts of all runs that it reported with its progress."""
        reports = [one for run in self._runs for one in run.reported()]
        total = Status(running=self._runs[-1].alive())
        for one in reports:
            total.saw_waiting(one.get("segmentsWaiting", 0))
            total.misrouted = max(total.misrouted, one.get("misrouted", 0))
        return total

    def tend(self) -> None:
        """Start it again if an outage of the broker ended it.

        Raises:
            StreamFailedError: It ended for another reason.
        """
        if self._runs[-1].alive():
            return
        if not self._outages:
            raise StreamFailedError(f"the query ended. {self.log_tail()}")
        self.gave_up += 1
        self._runs[-1].stop()
        self.start()

    def kill_at(self, victim: Enum | None, timeout_s: float) -> bool:
        """Kill a process of it (SIGKILL), after a batch or a while; whether it had a batch.

        Raises:
            StreamFailedError: It ended meanwhile as no fault explains.
            AssertionError: The other processes of it did not end in time.
        """
        run = self._runs[-1]
        end_s = time.monotonic() + timeout_s
        while not run.reported() and time.monotonic() < end_s:
            self.tend()
            time.sleep(POLL_S)
        reached = bool(run.reported())
        found = run.processes()
        java = [one for one in found if one.name() == "java"]
        if found:  # The JVM may not have started yet.
            run.kill(java[0] if victim is Victim.JVM and java else found[0], GONE_S)
        return reached

    def stop(self) -> None:
        """End it, and write the rows of its committed batches to the history."""
        self._runs[-1].stop()
        with HistoryWriter(self._settings.history) as history:
            history.write_all(committed_events(self._runs[-1].sink))

    def close(self) -> None:
        """End it, whatever it does."""
        for run in self._runs:
            run.stop()

    def log_tail(self) -> str:
        """The end of what it printed."""
        return f"Its log ends:\n{self._runs[-1].tail()}"


def committed_events(sink: Path) -> list[Event]:
    """Return the events of committed batches; their times are those of the files."""
    events = []
    for number, files in committed_files(sink).items():
        batch, written_s = str(number), 0.0
        events.append(Event(0.0, "started", batch=batch))
        for path in files:
            written_s = path.stat().st_mtime
            events += rows_of(path, batch, written_s)
        events += [Event(written_s, kind, batch=batch) for kind in ("completed", "checkpointed")]
    return events
