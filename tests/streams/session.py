"""A Spark session in a separate process, with several queries. It dies at a given step.

Lines of JSON on standard input are orders; events are appended to a file of JSON lines. Rows of
batches go into a SQLite file for each query, each batch once by its id.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import sys
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from examples.parquet_query import session

STEPS = ("PLANNED", "BEFORE", "INSIDE", "AFTER", "COMMITTED")
"""The offset log is written; the batch begins; some rows are read; the rows are durable; the commit
log is written."""
_LOOK_S = 0.01


def kill_with_children(pid: int) -> None:
    """Kill a process and all that it started, itself last."""
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for one in [*root.children(recursive=True), root]:
            with suppress(psutil.NoSuchProcess):
                one.kill()


def die() -> None:
    """Kill everything of this session at once."""
    kill_with_children(os.getpid())


class Queries:
    """The queries of this process.

    Args:
        spark: Session.
        directory: Where files are.
    """

    def __init__(self, spark: SparkSession, directory: Path) -> None:
        self._spark = spark
        self._directory = directory
        self._running: dict[str, StreamingQuery] = {}
        self._specs: dict[str, dict[str, Any]] = {}
        self._deadly: tuple[str, str] | None = None
        self._known: set[int] = set()
        self._lock = threading.Lock()

    def tell(self, what: str, **facts: Any) -> None:
        """Append an event."""
        with self._lock, (self._directory / "events.jsonl").open("a") as file:
            file.write(json.dumps({"t": time.time(), "what": what, **facts}) + "\n")

    def start(self, spec: dict[str, Any]) -> None:
        """Start a query, or tell why it cannot be."""
        name = spec["name"]
        try:
            reader = self._spark.readStream.format(spec["format"]).options(**spec["options"])
            rows = (reader.schema(spec["schema"]) if spec["schema"] else reader).load()
            # pulsar-client shows an empty key as none.
            how = f"{spec['options']['mode']} {spec['options'].get('transport') == 'client'}"
            tag = f"{how} {rows.schema.simpleString()}"
            writer = rows.writeStream.foreachBatch(
                lambda batch, number: self._batch(spec, tag, batch, number)
            )
            trigger = (
                {"availableNow": True} if spec["bounded"] else {"processingTime": "50 milliseconds"}
            )
            self._running[name] = (
                writer.option("checkpointLocation", spec["checkpoint"]).trigger(**trigger).start()
            )
        except PySparkException as exc:
            self.tell("failed", query=name, text=str(exc))
            return
        self._specs[name] = spec
        self.tell("started", query=name)

    def stop(self, name: str) -> None:
        """End a query."""
        query = self._running.pop(name, None)
        if query is not None:
            query.stop()
        self.tell("stopped", query=name)

    def look(self) -> None:
        """Find queries that ended, and processes to kill."""
        for name, query in list(self._running.items()):
            if query.isActive:
                continue
            del self._running[name]
            error = query.exception()
            if error is not None:
                self.tell("failed", query=name, text=str(error))
            elif self._specs[name]["bounded"]:
                self.tell("ended", query=name)
                self.start(self._specs[name])
        if self._deadly and self._deadly[1] in ("PLANNED", "COMMITTED"):
            now = self._logs(*self._deadly)
            if now - self._known:
                die()

    def order_death(self, name: str, step: str) -> None:
        """Die when a query is at a step."""
        self._known = self._logs(name, step)
        self._deadly = name, step

    def _logs(self, name: str, step: str) -> set[int]:
        log = "offsets" if step == "PLANNED" else "commits"
        return numbers_in(Path(self._specs[name]["checkpoint"]) / log)

    def _batch(self, spec: dict[str, Any], tag: str, batch: DataFrame, number: int) -> None:
        self._at(spec["name"], "BEFORE")
        if self._deadly == (spec["name"], "INSIDE"):
            for _ in batch.toLocalIterator():
                die()
        properties = "__messageProperties" if spec["format"] == "pulsar" else "__properties"
        rows = []
        for row in batch.collect():
            columns = row.asDict(recursive=True)
            found = int(columns.pop(properties)["n"])
            rows.append((found, json.dumps(columns, default=_plain, sort_keys=True)))
        digest = hashlib.sha256(repr(rows).encode()).hexdigest()
        with closing(sqlite3.connect(spec["sink"])) as sink, sink:
            known = sink.execute("SELECT tag, digest FROM batches WHERE id=?", (number,)).fetchone()
            if known is not None and known[0] == tag and known[1] != digest:
                before = sink.execute(
                    "SELECT n, columns FROM rows WHERE batch=? ORDER BY place", (number,)
                ).fetchall()
                self.tell(
                    "differs", query=spec["name"], batch=number, before=before, now=rows, tag=tag
                )
            sink.execute("DELETE FROM rows WHERE batch=?", (number,))
            sink.execute("INSERT OR REPLACE INTO batches VALUES (?, ?, ?)", (number, tag, digest))
            sink.executemany(
                "INSERT INTO rows VALUES (?, ?, ?, ?)",
                [(number, place, *row) for place, row in enumerate(rows)],
            )
        self._at(spec["name"], "AFTER")

    def _at(self, name: str, step: str) -> None:
        if self._deadly == (name, step):
            die()


def _plain(value: Any) -> Any:
    return {"hex": value.hex()} if isinstance(value, bytes | bytearray) else str(value)


def numbers_in(folder: Path) -> set[int]:
    """Batches in a log of a checkpoint."""
    found = folder.iterdir() if folder.is_dir() else ()
    return {int(one.name) for one in found if one.name.isdigit()}


def main(directory: Path) -> None:
    """Take orders until there are no more."""
    queries = Queries(session(), directory)
    queries.tell("ready")

    def listen() -> None:
        for line in sys.stdin:
            order = json.loads(line)
            if "start" in order:
                queries.start(order["start"])
            elif "stop" in order:
                queries.stop(order["stop"])
            elif "die" in order:
                queries.order_death(order["die"], order["step"])
        die()

    threading.Thread(target=listen, daemon=True).start()
    while True:
        queries.look()
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
