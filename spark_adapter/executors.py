"""Spark's executors as the place of workers: ``spark_adapter.start_workers`` (docs/adr/0020).

One long-lived barrier job in a scheduler pool of its own. Each of its tasks that stays has a door,
where queries get a worker process from; the others only make Spark spread them, and leave. What the
tasks agreed on comes to the driver in an accumulator, with the end of the first of those: tasks
open no connection to the driver's machine that Spark does not have anyway.
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

from keyshard.core.option_checks import check_integer
from keyshard.errors import ClusterError, ConfigError
from keyshard.redaction import first_line
from keyshard.threads import begin
from spark_adapter import registry
from spark_adapter.door import Door
from spark_adapter.preflight import check_workers

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

POOL = "keyshard-workers"
"""Scheduler pool of the job, where Spark has pools (``spark.scheduler.mode`` is ``FAIR``)."""
SLOTS_WAIT_S = 20.0
"""Longest wait for executors of a session that has just begun, seconds."""
SETTLED_S = 3.0
"""Time in which no executor came, seconds: then they are all there."""
START_WAIT_S = 120.0
"""Longest wait until all tasks run at once, seconds."""
AGAIN_S = 1.0
"""Pause before a job that ended is started again, seconds."""
LOOK_S = 0.1
"""Time between two looks, seconds."""

_started: WeakSet[ExecutorWorkers] = WeakSet()
"""All that :func:`start_workers` gave, and somebody has."""
_log = logging.getLogger(__name__)


class Slots(NamedTuple):
    """What a cluster has."""

    executors: int
    tasks: int
    """Tasks that run at once on all of them."""

    def wanted(self, count: int) -> int:
        """Tasks that make ``count`` of them lie on as many executors as there can be.

        So many that they do not fit on fewer.
        """
        spread = min(count, self.executors)
        most = -(-self.tasks // self.executors)
        return min(self.tasks, max(count + 1, (spread - 1) * most + 1))

    def check(self, count: int) -> None:
        """Refuse workers that would leave an executor without a free slot.

        Raises:
            ConfigError: They would.
        """
        free = self.tasks - self.executors
        if count > free:
            most = f"at most {free}" if free > 0 else "none"
            raise ConfigError(
                f"start_workers({count}) would leave less than one free slot on each executor: "
                f"Spark has {self.executors} of them with {self.tasks} slots in all, and a worker "
                f"keeps one for as long as it lives. Start {most}, or give the application more "
                "executors or cores."
            )


class Heard(AccumulatorParam[list[Any]]):
    """What tasks said; the newest last."""

    def zero(self, value: list[Any]) -> list[Any]:
        del value
        return []

    def addInPlace(self, value1: list[Any], value2: list[Any]) -> list[Any]:  # noqa: N802
        return [*value1, *value2]


def chosen(executors: list[str], count: int) -> list[int]:
    """Which tasks stay, by the executor of each: one on each of them before a second on any."""
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
        self._heard = context.accumulator([], Heard())
        self._told = 0
        self._error = ""
        self._thread = InheritableThread(target=self._run, name=self._group, daemon=True)
        self._thread.start()
        self._teller = begin(f"{self._group}-tell", self._tell)
        atexit.register(self.stop)

    def wait(self, timeout_s: float) -> None:
        """Wait until they are there.

        Raises:
            ClusterError: They are not.
        """
        end_s = time.monotonic() + timeout_s
        while not self._told:
            if self._error or time.monotonic() > end_s:
                raise ClusterError(
                    f"Spark did not run all tasks of start_workers({self._count}) at once within "
                    f"{timeout_s:.0f} s{self._error and f': {self._error}'}. Start workers before "
                    "queries take the slots. Every executor needs this release of keyshard[spark]."
                )
            self._stopping.wait(LOOK_S)

    def stop(self) -> None:
        """End them; queries that use them go on looking for others. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        atexit.unregister(self.stop)
        self._teller.join(10 * LOOK_S)
        registry.forget(self._jvm)
        if self._context._jsc is not None:  # else its tasks have ended with it
            self._context.cancelJobGroup(self._group)

    def _run(self) -> None:
        """Run the job, again and again, until the end of the application."""
        self._context.setLocalProperty("spark.scheduler.pool", POOL)
        self._context.setJobGroup(
            self._group, "keyshard: workers of queries", interruptOnCancel=True
        )
        while not self.ended():
            error = ""
            try:
                slots = slots_of(self._context)
                slots.check(self._count)
                # Queries have slots by now: as few at once as will do.
                self._once(self._count + 1 if self._told else slots.wanted(self._count))
            except Exception as exc:  # noqa: BLE001 - whatever ended the job: it begins again
                error = why(exc)
            self._stopping.wait(AGAIN_S)  # and the application may be about to end
            if error not in ("", self._error) and not self.ended():
                self._error = error
                _log.warning("the job of Spark workers begins again: %s", error)
        if not self._stopping.is_set():
            registry.forget(self._jvm)

    def ended(self) -> bool:
        """Whether this is to end, or the application has."""
        return self._stopping.is_set() or self._context._jsc is None

    def _once(self, tasks: int) -> None:
        token, count, heard = self._token, self._count, self._heard

        def host(_rows: Iterable[int]) -> Iterator[int]:
            return stay(token, count, heard)

        self._context.parallelize(range(tasks), tasks).barrier().mapPartitions(host).collect()

    def _tell(self) -> None:
        """Write down where workers are, whenever that is new."""
        while not self._stopping.wait(LOOK_S):
            said = self._heard.value
            if len(said) > self._told:
                registry.write(self._jvm, registry.Hosted(self._token, said[-1]))
                if self._told:
                    _log.warning("Spark workers were started again: %s", ", ".join(said[-1]))
                self._told = len(said)


def why(error: Exception) -> str:
    """What ended a job: the line that says so, of the many that Spark raises."""
    lines = [line.strip().removeprefix(": ") for line in str(error).splitlines()]
    for pattern in (r"\w*Error: .", r"ExecutorLostFailure", r"[\w.]*Exception: "):
        for line in reversed(lines):
            if re.match(pattern, line):
                return line
    return first_line(error)


def stay(token: str, count: int, heard: Any) -> Iterator[int]:
    """In a task: stay with a door for ever, or leave."""
    context = BarrierTaskContext.get()
    number = context.partitionId()
    address = context.getTaskInfos()[number].address
    door = Door(token, address.rpartition(":")[0].strip("[]"))
    said = [json.loads(one) for one in context.allGather(json.dumps([address, door.endpoint]))]
    staying = chosen([executor for executor, _ in said], count)
    if number in staying:
        threading.Event().wait()
    if number == min(set(range(len(said))) - set(staying)):
        heard.add([[said[task][1] for task in staying]])
    door.close()
    return iter(())


def slots_of(context: SparkContext) -> Slots:
    """What the cluster has now."""
    scala = context._jsc.sc()
    profile = scala.resourceProfileManager().defaultResourceProfile()
    executors = scala.getExecutorMemoryStatus().size() - 1  # one is the driver
    return Slots(executors, scala.maxNumConcurrentTasks(profile))


def _settled(context: SparkContext) -> Slots:
    """What the cluster has when executors of a session that has just begun are there."""
    end_s = time.monotonic() + SLOTS_WAIT_S
    slots, since_s = slots_of(context), time.monotonic()
    while time.monotonic() < min(end_s, since_s + SETTLED_S if slots.executors else end_s):
        time.sleep(LOOK_S)
        now = slots_of(context)
        if now != slots:
            slots, since_s = now, time.monotonic()
    return slots


def start_workers(spark: SparkSession, count: int) -> ExecutorWorkers:
    """Host the workers of queries on executors, for ``.option("workers", "spark:2")``.

    They keep a slot each for as long as the session lives, or until ``stop()``. Where an executor
    dies they are started again. Start them before the queries that use them.

    Args:
        spark: A session on a cluster.
        count: How many; what queries ask for together does not matter, one by one it does.

    Raises:
        ConfigError: Spark is local or behind Spark Connect, allocates executors as it likes, or
            would have less than one free slot on each.
        ClusterError: Not all of them began.
        WorkerEnvironmentError: The interpreter of Spark's Python workers lacks keyshard.
    """
    check_integer("count", count, 1, 256)
    context = getattr(spark, "_sc", None)
    if context is None:
        raise ConfigError(
            "start_workers() needs the process that has the SparkContext; this session is one of "
            "Spark Connect. Set option 'workers' to 'processes:2' instead."
        )
    scala = context._jsc.sc()
    if scala.isLocal():
        raise ConfigError(
            f"Spark is {context.master!r}: there are no executors but the driver. Set option "
            f"'workers' to 'processes:{count}' instead."
        )
    if context.getConf().get("spark.dynamicAllocation.enabled", "false") == "true":
        raise ConfigError(
            "spark.dynamicAllocation.enabled is true, with which Spark runs no barrier stage. Set "
            f"it to false, or option 'workers' to 'processes:{count}'."
        )
    if not all(one.ended() for one in _started):
        raise ConfigError(
            "start_workers() hosts workers of this application already. Queries share them; to "
            "have more, stop() what it gave before."
        )
    check_workers(spark)
    _settled(context).check(count)
    workers = ExecutorWorkers(context, count)
    _started.add(workers)
    try:
        workers.wait(START_WAIT_S)
    except BaseException:
        workers.stop()
        raise
    return workers
