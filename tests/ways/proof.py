"""``python -m tests.proofs ways``: random topics, read in every way and compared."""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from pyspark.sql import SparkSession

import spark_adapter
from tests.proofs.runner import Options, Outcome, Outcomes, Proof, failed
from tests.streams.cluster import Broker
from tests.support.deadlines import DeadlineError
from tests.support.machine import Since
from tests.ways.check import disagreement, verdict
from tests.ways.draw import WAYS, Publisher, readings
from tests.ways.kinds import KINDS
from tests.ways.produce import JavaProducers
from tests.ways.read import Reader

TOGETHER = 2
"""Ways in which a topic is read."""
SHOWN_MAX = 5
"""Most defects of a seed that are shown."""


def session() -> SparkSession:
    """A local session that knows the formats."""
    os.environ["RAY_ADDRESS"] = "local"  # not another one that runs here
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    # The progress without rows at the end of a query has the counts of its last batch.
    builder = builder.config("spark.sql.streaming.noDataProgressEventInterval", "0")
    builder = builder.config("spark.python.authenticate.socketTimeout", "60s")
    spark = builder.config("spark.sql.shuffle.partitions", "2").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    spark_adapter.register(spark)
    return spark


class Run(NamedTuple):
    """One run of the program."""

    broker: Broker
    reader: Reader
    java: JavaProducers
    kind: str | None
    way: str | None

    def hold(self, seed: int) -> Outcome:
        """Publish a topic and read it; its counts are readings by way and outcome."""
        since = Since()
        drawn = random.Random(seed)
        made = Publisher(drawn, self.broker, self.java).published(f"ways-{seed}", self.kind)
        found, read = [], []
        counts = Counter({f"{made.kind} by {made.producer}": 1})
        try:
            whole = made.read_as == made.topic.name
            possible = [way for way in WAYS if whole or not way.startswith("table")]
            for how in readings(drawn, [self.way] if self.way else possible, made, TOGETHER):
                out = self.reader.read(made, how)
                counts[f"{how.way}, {how.transport}: {out.code or 'whole'}"] += 1
                found += [f"{how}\n    {one}" for one in verdict(made, how, out)]
                read.append((how, out))
            found += [one for pair in combinations(read, 2) for one in disagreement(*pair)]
        finally:
            self.broker.delete(made.topic.name, made.topic.partitions)
        late = [f"{how}: {len(out.rows)} rows in time" for how, out in read if out.is_late]
        if late and not found:
            return replace(failed(seed, DeadlineError("; ".join(late)), since), details=made.text())
        # The first defects of a seed tell the others.
        details = "\n".join(found[:SHOWN_MAX])
        return Outcome(seed, made.text() if found else "", details, counts)


def _outcomes(given: Options, seeds: range) -> Outcomes:
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        broker = opened.enter_context(Broker(folder / "broker"))
        java = opened.enter_context(closing(JavaProducers(broker.service_url, folder)))
        spark = session()
        opened.callback(spark.stop)
        run = Run(broker, Reader(broker, spark, folder), java, given.kind, given.way)
        yield from map(run.hold, seeds)


PROOF = Proof(
    _outcomes, seeds=20, keep_going=True,
    options={
        "--kind": {"choices": tuple(KINDS), "help": "of all values (default: drawn)"},
        "--way": {"choices": WAYS, "help": "the only one (default: two of them are drawn)"},
    },
)  # fmt: skip
