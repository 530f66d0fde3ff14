"""One topic of a Spark test: its messages, the rows of a query, and its backlog."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import pulsar
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from keyshard.core.position.entry import full_topic_name
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import create_partitioned_topic
from tests.spark.spark_process import eventually
from tests.support.deadlines import DeadlineError, deadline

SUBSCRIPTION = "spark"
ENDS_WITHIN_S = deadline(120)
"""Longest time a bounded query of a test may take, seconds."""


class SparkTopic:
    """A partitioned topic, its query and its backlog."""

    def __init__(self, broker: DevBroker, name: str, directory: Path, partitions: int = 3) -> None:
        self.broker = broker
        self.name = name
        self.partitions = partitions
        self.checkpoint = directory / "checkpoint"
        self.sent: list[str] = []
        self.seen: list[list[tuple[str, str]]] = []
        """(key, value) of each row, in the order of the batch's partitions; one list per look."""
        create_partitioned_topic(broker.admin_url, name, partitions)

    def produce(self, count: int, keys: int = 20, **producer: Any) -> None:
        """Send messages ``key:number``, not batched."""
        with closing(self.client()) as client:
            sender = client.create_producer(
                self.name, batching_enabled=False, block_if_queue_full=True, **producer
            )
            for _ in range(count):
                number = len(self.sent)
                key = f"key-{number % keys}"
                self.sent.append(f"{key}:{number}")
                sender.send_async(self.sent[-1].encode(), None, partition_key=key)
            sender.flush()

    def client(self) -> pulsar.Client:
        """A client of the broker; close it."""
        return pulsar.Client(
            self.broker.service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
        )

    def options(self, **options: str) -> dict[str, str]:
        """Options that read the topic from its beginning; names with ``_`` for ``.``."""
        given = {
            "service.url": self.broker.service_url,
            "admin.url": self.broker.admin_url,
            "topic": self.name,
            "subscription": SUBSCRIPTION,
            "startingOffsets": "earliest",
            "parallelism": "4",
            "operationTimeoutMillis": "10000",
        }
        given |= {name.replace("_", "."): value for name, value in options.items()}
        return {name: value for name, value in given.items() if value}

    def rows(self, spark: SparkSession, **options: str) -> DataFrame:
        """The streaming rows of the topic; see :meth:`options`."""
        return spark.readStream.format("keyshard").options(**self.options(**options)).load()

    def start(
        self,
        rows: DataFrame,
        look: Callable[[DataFrame, int], None] | None = None,
        checkpoint: str | None = None,
        trigger: dict[str, Any] | None = None,
        **options: str,
    ) -> StreamingQuery:
        """Start a query; by default it is bounded and notes its rows in :attr:`seen`."""
        writer = rows.selectExpr("__key", "cast(value as string) as value").writeStream
        return (
            writer.foreachBatch(look or self.note)
            .option("checkpointLocation", checkpoint or str(self.checkpoint))
            .options(**options)
            .trigger(**(trigger or {"availableNow": True}))
            .start()
        )

    def note(self, batch: DataFrame, _number: int) -> None:
        """A look at a batch that keeps its rows."""
        self.seen.append([(row["__key"], row["value"]) for row in batch.collect()])

    def values(self) -> Counter[str]:
        """All values seen, with how often."""
        return Counter(value for rows in self.seen for _, value in rows)

    def backlog(self) -> int:
        """Entries that the broker holds for the subscription."""
        return sum(map(self.backlog_of, range(self.partitions)))

    def backlog_of(self, partition: int) -> int:
        """Return the :meth:`backlog` of one partition."""
        return int(self._get(partition, "stats")["subscriptions"][SUBSCRIPTION]["msgBacklog"])

    def entries(self) -> int:
        """Entries stored in all partitions."""
        stats = [self._get(i, "internalStats") for i in range(self.partitions)]
        return sum(int(one["numberOfEntries"]) for one in stats)

    def acknowledged(self) -> list[str]:
        """The acknowledged entries of the cursors, by partition; to check that none was."""
        found = [self._get(i, "internalStats")["cursors"] for i in range(self.partitions)]
        cursors = [cursors[SUBSCRIPTION] for cursors in found if SUBSCRIPTION in cursors]
        return [f"{c['markDeletePosition']} {c['individuallyDeletedMessages']}" for c in cursors]

    def skip(self, partition: int, count: int) -> None:
        """Acknowledge the next entries of a partition, as an operator can."""
        answer = httpx.post(f"{self._url(partition)}/subscription/{SUBSCRIPTION}/skip/{count}")
        answer.raise_for_status()

    def delete_subscription(self, partition: int) -> None:
        """Delete the subscription of a partition."""
        url = f"{self._url(partition)}/subscription/{SUBSCRIPTION}"
        httpx.delete(url, timeout=deadline(20)).raise_for_status()

    def trim(self, partition: int) -> None:
        """Close the ledger of a partition, and let the broker delete it."""

        def ledgers() -> set[int]:
            return {one["ledgerId"] for one in self._get(partition, "internalStats")["ledgers"]}

        before = ledgers()
        httpx.put(f"{self._url(partition)}/unload", timeout=deadline(20)).raise_for_status()

        def trimmed() -> bool:
            answer = httpx.post(f"{self._url(partition)}/trim", timeout=deadline(20))
            answer.raise_for_status()
            return not ledgers() & before

        eventually(trimmed, deadline(60), "closed ledgers deleted")

    def grow(self, partitions: int) -> None:
        """Give the topic more partitions."""
        path = full_topic_name(self.name).replace("://", "/")
        url = f"{self.broker.admin_url}/admin/v2/{path}/partitions"
        httpx.post(url, json=partitions).raise_for_status()
        self.partitions = partitions

    def offsets(self, number: int) -> dict[str, Any]:
        """The checkpoint in Spark's offset log."""
        text = (self.checkpoint / "offsets" / str(number)).read_text().splitlines()[-1]
        result: dict[str, Any] = json.loads(text)
        return result

    def _get(self, partition: int, what: str) -> Any:
        answer = httpx.get(f"{self._url(partition)}/{what}?getPreciseBacklog=true")
        answer.raise_for_status()
        return answer.json()

    def _url(self, partition: int) -> str:
        path = full_topic_name(self.name).replace("://", "/")
        return f"{self.broker.admin_url}/admin/v2/{path}-partition-{partition}"


def ended(query: StreamingQuery, timeout_s: float = ENDS_WITHIN_S) -> None:
    """Wait until a bounded query ends by itself."""
    try:
        if not query.awaitTermination(int(timeout_s)):
            raise DeadlineError(f"the query did not end within {timeout_s:.0f} s")
    finally:
        query.stop()


def failed(query: StreamingQuery, timeout_s: float = ENDS_WITHIN_S) -> str:
    """Wait until a query fails. Return the message of its error."""
    with suppress(StreamingQueryException):
        ended(query, timeout_s)
    error = query.exception()
    assert error is not None, "the query ended without an error"
    return str(error)


def without_last_commit(checkpoint: Path) -> Path:
    """Remove the last commit, as if the driver died after its write; return its path."""
    commits = checkpoint / "commits"
    last = max((one for one in commits.iterdir() if one.name.isdigit()), key=lambda x: int(x.name))
    last.unlink()
    (commits / f".{last.name}.crc").unlink(missing_ok=True)
    return last


def in_order(rows: list[tuple[str, str]]) -> bool:
    """Whether the numbers of each key ascend."""
    last: dict[str, int] = {}
    for key, value in rows:
        number = int(value.rpartition(":")[2])
        if number <= last.get(key, -1):
            return False
        last[key] = number
    return True
