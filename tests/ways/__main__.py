"""``python -m tests.ways``: random topics, read in every way, compared with their messages."""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from pyspark.sql import SparkSession

import spark_adapter
from tests.streams.cluster import Broker
from tests.ways.check import verdict
from tests.ways.draw import WAYS, Published, Reading, published, readings
from tests.ways.read import Reader

TOGETHER = 2
"""Ways in which a topic is read."""


def session() -> SparkSession:
    """A local session that knows the formats."""
    os.environ["RAY_ADDRESS"] = "local"  # not another one that runs here
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    builder = builder.config("spark.python.authenticate.socketTimeout", "60s")
    spark = builder.config("spark.sql.shuffle.partitions", "2").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    spark_adapter.register(spark)
    return spark


def hold(
    broker: Broker, reader: Reader, seed: int, ways: Counter[str]
) -> list[tuple[Published, Reading, str]]:
    """Publish a topic and read it; returns the errors."""
    drawn = random.Random(seed)
    made = published(drawn, broker, f"ways-{seed}")
    found = []
    try:
        whole = made.read_as == made.topic.name
        possible = [way for way in WAYS if whole or not way.startswith("table")]
        for how in readings(drawn, possible, made.kind, TOGETHER):
            out = reader.read(made, how)
            ways[f"{how.way}: {out.code or 'whole'}"] += 1
            found += [(made, how, one) for one in verdict(made, how, out)]
    finally:
        broker.delete(made.topic.name, made.topic.partitions)
    return found


def main() -> int:
    """Run; 0: everything came out or was named."""
    parser = argparse.ArgumentParser(prog="python -m tests.ways", description=__doc__)
    parser.add_argument("--draws", type=int, default=20, help="number of topics (default: 20)")
    parser.add_argument("--seed", type=int, help="of the first; default: another each time")
    given = parser.parse_args()
    first = random.SystemRandom().randrange(10**9) if given.seed is None else given.seed
    print(f"{given.draws} draws from seed {first}", flush=True)
    ways: Counter[str] = Counter()
    bad, began = [], time.monotonic()
    with tempfile.TemporaryDirectory() as folder, Broker(Path(folder) / "broker") as broker:
        spark = session()
        reader = Reader(broker, spark, Path(folder))
        for seed in range(first, first + given.draws):
            problems = hold(broker, reader, seed, ways)
            for made, how, output in problems:
                print(f"BAD seed {seed}: {how}\n    {made.text()}\n    {output}", flush=True)
            bad += [seed] if problems else []
            if not (seed + 1 - first) % 20:
                print(f"{seed + 1 - first} draws, {time.monotonic() - began:.0f} s", flush=True)
        spark.stop()
    for name, times in sorted(ways.items()):
        print(f"{times:6,} {name}")
    print(f"{given.draws} draws from seed {first}: {len(bad)} bad {bad}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
