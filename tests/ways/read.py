"""The ways to read a topic: their rows, counts and ends."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import keyshard
import ray_adapter
import spark_adapter
from keyshard import KeyShardSource
from keyshard.errors import KeyShardError
from spark_adapter import catalog
from tests.streams.cluster import Broker
from tests.streams.values import INLINE, NONE, SEPARATED, TEXT
from tests.ways.draw import ALL, METADATA, Published, Reading

DEADLINE_S = 60
QUIET_S = 2.0
"""A live way in ends when it has handed out nothing new for so long after the last expected row."""
_CODE = "[KEYSHARD_"
_COUNTS = ("malformedDropped", "encryptedSkipped", "corruptSkipped")


@dataclass(slots=True)
class Outcome:
    """Outcome of one way in."""

    rows: list[Mapping[str, Any]] = field(default_factory=list)
    """The rows, with the message number ``n`` if a column has it."""
    code: str = ""
    """Code of the error that ended it."""
    error: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    malformed: set[int] = field(default_factory=set)
    """Messages with refused data."""


class Reader:
    """Reads topics of one broker in every way.

    Args:
        broker: Where they are.
        spark: A session.
        directory: For checkpoints.
    """

    def __init__(self, broker: Broker, spark: SparkSession, directory: Path) -> None:
        self._broker = broker
        self._spark = spark
        self._directory = directory
        self._number = 0

    def read(self, made: Published, how: Reading) -> Outcome:
        """Read a topic in one way.

        Args:
            made: The topic.
            how: The way.
        """
        self._number += 1
        outcome = Outcome()
        try:
            _WAYS[how.way](self, made, how, outcome)
        except KeyShardError as exc:
            outcome.code, outcome.error = exc.code, str(exc)
        except PySparkException as exc:
            outcome.error = str(exc)
            outcome.code = _code(str(exc))
        except Exception as exc:  # noqa: BLE001 - Ray's errors carry ours in their text
            outcome.error = f"{type(exc).__name__}: {exc}"
            outcome.code = _code(str(exc))
        return outcome

    # -- Spark ------------------------------------------------------------------------------------

    def _options(self, made: Published, how: Reading, *, stream: bool) -> dict[str, str]:
        options = {
            "service.url": self._broker.service_url,
            "admin.url": self._broker.admin_url,
            "mode": how.mode,
        }
        if how.way not in ("table", "table stream"):
            options["topic"] = made.read_as
        if stream:
            name = "predefinedSubscription" if how.by_pulsar_name else "subscription"
            options |= {
                name: f"ways-{self._number}",
                "startingOffsets": "earliest",
                "parallelism": "3",
                "onEncrypted": "skip" if how.skips_encrypted else "fail",
            }
            if how.workers != "embedded":
                options["workers"] = how.workers
        return options

    def _format(self, how: Reading) -> str:
        return "pulsar" if how.by_pulsar_name else "keyshard"

    def _batch(self, made: Published, how: Reading, out: Outcome) -> None:
        reader = self._spark.read.format(self._format(how))
        reader = reader.options(**self._options(made, how, stream=False))
        schema = _schema(made, how)
        frame = (reader.schema(schema) if schema else reader).load()
        out.rows += _rows(frame.toArrow())

    def _stream(self, made: Published, how: Reading, out: Outcome) -> None:
        reader = self._spark.readStream.format(self._format(how))
        reader = reader.options(**self._options(made, how, stream=True))
        schema = _schema(made, how)
        self._run((reader.schema(schema) if schema else reader).load(), made, how, out)

    def _table(self, made: Published, how: Reading, out: Outcome) -> None:
        name = self._sync(made, how, stream=False)
        out.rows += _rows(self._spark.table(name).toArrow())

    def _table_stream(self, made: Published, how: Reading, out: Outcome) -> None:
        name = self._sync(made, how, stream=True)
        self._run(self._spark.readStream.table(name), made, how, out)

    def _sync(self, made: Published, how: Reading, *, stream: bool) -> str:
        options = self._options(made, how, stream=stream)
        catalog.sync(self._spark, namespaces=["public/default"], options=options)
        return f"`public/default`.`{made.topic.name}`"

    def _run(self, frame: DataFrame, made: Published, how: Reading, out: Outcome) -> None:
        """Run a query to its end, or until it has counted the rows that it leaves out."""
        parts: list[pa.Table] = []
        query = (
            frame.writeStream.foreachBatch(lambda rows, _: parts.append(rows.toArrow()))
            .option("checkpointLocation", str(self._directory / f"checkpoint-{self._number}"))
            .trigger(
                **({"availableNow": True} if how.ends else {"processingTime": "100 milliseconds"})
            )
            .start()
        )
        end = time.monotonic() + DEADLINE_S
        try:
            while not query.awaitTermination(DEADLINE_S if how.ends else 1):
                rows = sum(part.num_rows for part in parts)
                out.counts = _counts(query)
                locked = made.encrypted - made.later
                if rows + out.counts.get("malformedDropped", 0) >= made.expected and (
                    not locked or out.counts.get("encryptedSkipped")
                ):
                    break
                if time.monotonic() >= end:
                    out.error = f"{rows} rows, {out.counts} after {DEADLINE_S:.0f} s"
                    break
        finally:
            query.stop()
            for part in parts:
                out.rows += _rows(part)

    # -- Python -----------------------------------------------------------------------------------

    def _source(self, made: Published, how: Reading) -> KeyShardSource:
        return KeyShardSource(
            made.read_as,
            subscription=f"ways-{self._number}",
            service_url=self._broker.service_url,
            admin_url=self._broker.admin_url,
            parallelism=3,
            starting_position="earliest",
            on_encrypted="skip" if how.skips_encrypted else "fail",
            workers=how.workers,
            # A handler needs the bytes of a key that stands apart from its value.
            metadata_columns=["__keyBytes"] if made.kind == SEPARATED else [],
        )

    def _embedded(self, made: Published, how: Reading, out: Outcome) -> None:
        source = self._source(made, how)
        raw: list[pa.RecordBatch] = []
        with source.open() as stream:
            try:
                end = time.monotonic() + DEADLINE_S
                while sum(one.num_rows for one in raw) < made.expected and time.monotonic() < end:
                    batch = stream.next_batch(timeout_s=1.0)
                    if batch is not None:
                        raw += batch
                        stream.commit(batch)
                raw += stream.next_batch(timeout_s=QUIET_S) or []
            finally:
                out.counts["encryptedSkipped"] = stream.status()["encryptedSkipped"]
                out.rows += _raw_rows(raw)
        out.rows[:] = []
        out.rows += _decoded(made, source, raw)

    def _batches(self, made: Published, how: Reading, out: Outcome) -> None:
        source = self._source(made, how)
        timer = threading.Timer(DEADLINE_S, _stopped, [source])
        timer.start()
        try:
            for batch in source.batches(max_wait_s=0.2):
                out.rows += _raw_rows([batch.records])
                batch.ack()
                if len(out.rows) >= made.expected:
                    _counted(source, out)
                    source.stop()
        finally:
            timer.cancel()

    def _handlers(self, made: Published, how: Reading, out: Outcome) -> None:
        source = self._source(made, how)
        lock = threading.Lock()

        def handle(message: keyshard.Message) -> None:
            number = int(message.properties["n"])
            try:
                output = message.data
            except KeyShardError as exc:
                if exc.code != "KEYSHARD_MALFORMED_MESSAGE":
                    raise
                with lock:
                    out.malformed.add(number)
                output = None
            with lock:
                out.rows.append(_of_handler(made, number, message.value, output))
                over = len(out.rows) >= made.expected
            if over:
                _counted(source, out)
                source.stop()

        timer = threading.Timer(DEADLINE_S, _stopped, [source])
        timer.start()
        try:
            source.run(handle)
        finally:
            timer.cancel()

    def _ray(self, made: Published, how: Reading, out: Outcome) -> None:
        dataset = ray_adapter.read(self._source(made, how), override_num_blocks=2)
        out.rows += [
            {"n": _number(row["__properties"]), "raw": row["value"]} for row in dataset.take_all()
        ]


_WAYS: dict[str, Callable[[Reader, Published, Reading, Outcome], None]] = {
    "spark batch": Reader._batch,
    "spark stream": Reader._stream,
    "table": Reader._table,
    "table stream": Reader._table_stream,
    "embedded": Reader._embedded,
    "handlers": Reader._handlers,
    "batches": Reader._batches,
    "ray": Reader._ray,
}


def _counts(query: StreamingQuery) -> dict[str, int]:
    """Rows that the newest progress counts as left out."""
    counts: dict[str, int] = {}
    for progress in query.recentProgress:
        output = json.loads(progress.sources[0].latestOffset or "{}")
        counts |= {name: output[name] for name in _COUNTS if name in output}
    return counts


def _schema(made: Published, how: Reading) -> str:
    """Columns that Spark is asked for; empty for all."""
    if how.columns == ALL:
        return ""
    properties = "__messageProperties" if how.by_pulsar_name else "__properties"
    metadata = f"{properties} map<string,string>, __topic string"
    if how.columns == METADATA:
        return metadata
    values = {
        NONE: "value binary", TEXT: "value string",
        INLINE: "value string, key string", SEPARATED: "value string, key string",
    }.get(made.kind, "name string")  # fmt: skip
    return f"{values}, {metadata}"


def _rows(table: pa.Table) -> list[dict[str, Any]]:
    found = []
    for row in table.to_pylist():
        properties = row.get("__properties", row.get("__messageProperties"))
        found.append({**row, "n": _number(properties)})
    return found


def _raw_rows(batches: list[pa.RecordBatch]) -> list[dict[str, Any]]:
    """Rows without their values: a decoder makes those."""
    return [
        {"n": _number(one), "raw": value}
        for batch in batches
        for one, value in zip(
            batch.column("__properties").to_pylist(), batch.column("value").to_pylist(), strict=True
        )
    ]


def _decoded(
    made: Published, source: KeyShardSource, raw: list[pa.RecordBatch]
) -> list[dict[str, Any]]:
    rows = _raw_rows(raw)
    with suppress(keyshard.errors.MalformedMessageError):
        decoded = [row for one in source.decoder().decoded(raw) for row in one.to_pylist()]
        rows = [{**row, "n": _number(row["__properties"])} for row in decoded]
    return rows


def _of_handler(made: Published, number: int, value: bytes | None, data: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"n": number, "raw": value}
    if isinstance(data, dict):
        row |= data
    elif made.kind in (TEXT, NONE):
        row["value"] = data
    return row


def _number(properties: Any) -> int:
    return int(dict(properties)["n"])


def _counted(source: KeyShardSource, out: Outcome) -> None:
    window = source.status()["window"]
    out.counts["encryptedSkipped"] = 0 if window is None else window["encryptedSkipped"]


def _stopped(source: KeyShardSource) -> None:
    with suppress(KeyShardError):
        source.stop()


def _code(text: str) -> str:
    """The code that an error's text names."""
    _, found, rest = text.partition(_CODE)
    return f"KEYSHARD_{rest.partition(']')[0]}" if found else ""


assert spark_adapter  # its formats are registered by the session
