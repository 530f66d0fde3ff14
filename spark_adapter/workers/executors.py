"""Start workers on Spark's executors: ``spark_adapter.start_workers`` (docs/adr/0020).

One long-lived barrier job runs in a scheduler pool of its own. It has more tasks than workers, so
that Spark spreads them over the executors. Each task that stays runs a worker launcher, from which
queries get worker processes; the other tasks leave. The first task that leaves reports the
endpoints to the driver through an accumulator. So no task opens a connection to the driver beyond
those of Spark.
"""

from __future__ import annotations

import atexit
import json
import logging
import re
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

from pyspark import BarrierTaskContext, InheritableThread
from pyspark.accumulators import AccumulatorParam

from keyshard.base_error import first_line
from keyshard.core.option_checks import check_integer
from keyshard.errors import ClusterError, ConfigError, KeyShardError
from keyshard.threads import begin
from spark_adapter.preflight import check_workers, is_true
from spark_adapter.workers import registry
from spark_adapter.workers.launcher import WorkerLauncher

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

POOL = "keyshard-workers"
"""Scheduler pool of the job, if Spark has pools (``spark.scheduler.mode`` is ``FAIR``)."""
SLOTS_WAIT_S = 20.0
"""Longest wait for the executors of a new session, seconds."""
STABLE_S = 3.0
"""Time without a new executor after which all are assumed to be there, seconds."""
START_WAIT_S = 120.0
"""Longest wait until all tasks run at once, seconds."""
AGAIN_S = 1.0
"""Wait before an ended job starts again, seconds."""
LOOK_S = 0.1
"""Polling interval, seconds."""

_started: WeakSet[ExecutorWorkers] = WeakSet()
"""Results of :func:`start_workers` that are still referenced."""
_log = logging.getLogger(__name__)


class Slots(NamedTuple):
    """Executors and task slots of a cluster."""

    executors: int
    tasks: int
    """Tasks that can run at once on all executors."""

    def tasks_for(self, count: int) -> int:
        """Return how many tasks spread ``count`` workers over as many executors as possible.

        Fewer executors have too few task slots for so many tasks.
        """
        spread = min(count, self.executors)
        most = -(-self.tasks // self.executors)
        return min(self.tasks, max(count + 1, (spread - 1) * most + 1))

    def check(self, count: int) -> None:
        """Refuse workers that would leave an executor without a free task slot.

        Raises:
            ConfigError: There are too few task slots for ``count`` workers.
        """
        free = self.tasks - self.executors
        if count > free:
            most = f"at most {free}" if free > 0 else "none"
            raise ConfigError(
                f"start_workers({count}) leaves an executor without a free slot: Spark has "
                f"{self.executors} executors with {self.tasks} slots in all, and each worker "
                "occupies one.",
                f"Start {most}, or give the application more executors or cores.",
            )


class Reports(AccumulatorParam[list[Any]]):
    """Reports of tasks, newest last."""

    def zero(self, value: list[Any]) -> list[Any]:
        del value
        return []

    def addInPlace(self, value1: list[Any], value2: list[Any]) -> list[Any]:  # noqa: N802
        return [*value1, *value2]


def choose_tasks(executors: list[str], count: int) -> list[int]:
    """Choose the tasks that stay: one on each executor before a second on any.

    Args:
        executors: The executor of each task.
        count: Number of tasks to choose.
    """
    seen: dict[str, int] = {}
    ranks: list[tuple[int, int]] = []
    for task, executor in enumerate(executors):
        seen[executor] = seen.get(executor, 0) + 1
        ranks.append((seen[executor], task))
    return sorted(task for _, task in sorted(ranks)[:count])


class ExecutorWorkers:
    """Workers on the executors of an application; see :func:`start_workers`."""

    def __init__(self, context: SparkContext, count: int) -> None:
        self._context = context
        self._count = count
        self._jvm = int(context._jvm.java.lang.ProcessHandle.current().pid())  # type: ignore[union-attr]
        self._token = secrets.token_hex(16)
        self._group = f"keyshard-workers-{secrets.token_hex(4)}"
        self._stopping = threading.Event()
        self._reports = context.accumulator([], Reports())
        self._published = 0
        self._error = ""
        self._thread = InheritableThread(target=self._run, name=self._group, daemon=True)
        self._thread.start()
        self._publisher = begin(f"{self._group}-publish", self._publish)
        atexit.register(self.stop)

    def wait(self, timeout_s: float) -> None:
        """Wait until the worker launchers run.

        Raises:
            ClusterError: They do not run in time, or the job failed.
        """
        end_s = time.monotonic() + timeout_s
        while not self._published:
            if self._error or time.monotonic() > end_s:
                raise ClusterError(
                    f"Spark did not run all tasks of start_workers({self._count}) at once within "
                    f"{timeout_s:.0f} s{self._error and f': {self._error}'}.",
                    "Start workers before queries occupy the slots, and install this release of "
                    "keyshard[spark] on every executor.",
                )
            self._stopping.wait(LOOK_S)

    def stop(self) -> None:
        """End the job. Queries that use the workers look for new ones. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        atexit.unregister(self.stop)
        self._publisher.join(10 * LOOK_S)
        registry.forget(self._jvm)
        if self._context._jsc is not None:  # a stopped context has already ended the job
            self._context.cancelJobGroup(self._group)

    def _run(self) -> None:
        """Run the job again whenever it ends, until the application ends."""
        self._context.setLocalProperty("spark.scheduler.pool", POOL)
        self._context.setJobGroup(
            self._group, "keyshard: workers of queries", interruptOnCancel=True
        )
        while not self.ended():
            error = ""
            try:
                slots = slots_of(self._context)
                slots.check(self._count)
                # After the first run, queries occupy task slots: ask for the fewest tasks.
                self._once(self._count + 1 if self._published else slots.tasks_for(self._count))
            except Exception as exc:  # noqa: BLE001 - any error ends the job, which starts again
                error = why(exc)
            self._stopping.wait(AGAIN_S)  # the application may be about to end
            if error not in ("", self._error) and not self.ended():
                self._error = error
                _log.warning("the Spark job of the workers starts again: %s", error)
        if not self._stopping.is_set():
            registry.forget(self._jvm)

    def ended(self) -> bool:
        """Whether :meth:`stop` was called or the application has ended."""
        return self._stopping.is_set() or self._context._jsc is None

    def _once(self, tasks: int) -> None:
        token, count, reports = self._token, self._count, self._reports

        def host(_rows: Iterable[int]) -> Iterator[int]:
            return host_or_leave(token, count, reports)

        self._context.parallelize(range(tasks), tasks).barrier().mapPartitions(host).collect()

    def _publish(self) -> None:
        """Write the endpoints of the launchers to the registry whenever they change."""
        while not self._stopping.wait(LOOK_S):
            reported = self._reports.value
            if len(reported) > self._published:
                registry.write(self._jvm, registry.RegisteredLaunchers(self._token, reported[-1]))
                if self._published:
                    _log.warning("Spark workers were started again: %s", ", ".join(reported[-1]))
                self._published = len(reported)


def why(error: Exception) -> str:
    """Return the line of a Spark error that names the cause."""
    if isinstance(error, KeyShardError):
        return error.summary
    lines = [line.strip().removeprefix(": ") for line in str(error).splitlines()]
    for pattern in (r"\w*Error: .", r"ExecutorLostFailure", r"[\w.]*Exception: "):
        for line in reversed(lines):
            if re.match(pattern, line):
                return line
    return first_line(error)


def host_or_leave(token: str, count: int, reports: Any) -> Iterator[int]:
    """Run a task of the job: stay forever with a worker launcher, or leave."""
    context = BarrierTaskContext.get()
    number = context.partitionId()
    address = context.getTaskInfos()[number].address
    launcher = WorkerLauncher(token, address.rpartition(":")[0].strip("[]"))
    reported = [
        json.loads(one) for one in context.allGather(json.dumps([address, launcher.endpoint]))
    ]
    staying = choose_tasks([executor for executor, _ in reported], count)
    if number in staying:
        threading.Event().wait()
    if number == min(set(range(len(reported))) - set(staying)):
        reports.add([[reported[task][1] for task in staying]])
    launcher.close()
    return iter(())


def slots_of(context: SparkContext) -> Slots:
    """Return the executors and task slots that the cluster has now."""
    scala = context._jsc.sc()
    profile = scala.resourceProfileManager().defaultResourceProfile()
    executors = scala.getExecutorMemoryStatus().size() - 1  # one is the driver
    return Slots(executors, scala.maxNumConcurrentTasks(profile))


def _stable_slots(context: SparkContext) -> Slots:
    """Wait for the executors of a new session; return them and their task slots."""
    end_s = time.monotonic() + SLOTS_WAIT_S
    slots, since_s = slots_of(context), time.monotonic()
    while time.monotonic() < min(end_s, since_s + STABLE_S if slots.executors else end_s):
        time.sleep(LOOK_S)
        now = slots_of(context)
        if now != slots:
            slots, since_s = now, time.monotonic()
    return slots


def start_workers(spark: SparkSession, count: int) -> ExecutorWorkers:
    """Host workers on Spark's executors, for queries with ``.option("workers", "spark:2")``.

    Each worker keeps one task slot until the session ends or ``stop()`` is called. If an executor
    dies, its workers start again. Call this before the queries start.

    Args:
        spark: A session on a cluster.
        count: Number of workers, 1 to 256. Queries share them, so each query may ask for up to this
            many.

    Raises:
        ConfigError: Spark is local, behind Spark Connect or uses dynamic allocation; or fewer than
            one free task slot per executor would remain.
        ClusterError: Not all workers started.
        WorkerEnvironmentError: The interpreter of Spark's Python workers lacks keyshard.
    """
    check_integer("count", count, 1, 256)
    context = getattr(spark, "_sc", None)
    if context is None:
        raise ConfigError(
            "start_workers() needs the process of the SparkContext, but this session uses Spark "
            "Connect.",
            "Set option 'workers' to 'processes:2' instead.",
        )
    scala = context._jsc.sc()
    if scala.isLocal():
        raise ConfigError(
            f"Spark is {context.master!r}, which has no executors beside the driver.",
            f"Set option 'workers' to 'processes:{count}' instead.",
        )
    if is_true(context.getConf().get("spark.dynamicAllocation.enabled")):
        raise ConfigError(
            "spark.dynamicAllocation.enabled is true, and then Spark runs no barrier stage.",
            f"Set it to false, or set option 'workers' to 'processes:{count}'.",
        )
    if not all(one.ended() for one in _started):
        raise ConfigError(
            "start_workers() already hosts workers of this application, and queries share them.",
            "To change their number, first call stop() on the returned object.",
        )
    check_workers(spark)
    _stable_slots(context).check(count)
    workers = ExecutorWorkers(context, count)
    _started.add(workers)
    try:
        workers.wait(START_WAIT_S)
    except BaseException:
        workers.stop()
        raise
    return workers
