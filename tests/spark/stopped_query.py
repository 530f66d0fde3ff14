"""A program that stops its Spark session, and not its query, and goes on.

``python stopped_query.py TOPIC SERVICE_URL ADMIN_URL CHECKPOINT``
"""

from __future__ import annotations

import sys

from examples.parquet_query import session


def main() -> None:
    """Say on standard output what was done, and live until standard input ends."""
    topic, service_url, admin_url, checkpoint = sys.argv[1:]
    spark = session()
    rows = (
        spark.readStream.format("keyshard")
        .option("topic", topic)
        .option("subscription", "stopped")
        .option("service.url", service_url)
        .option("admin.url", admin_url)
        .option("startingOffsets", "earliest")
        .option("parallelism", 2)
        .load()
    )
    writer = rows.writeStream.format("noop").option("checkpointLocation", checkpoint)
    query = writer.trigger(processingTime="1 second").start()
    while not any(one["numInputRows"] for one in query.recentProgress):
        query.awaitTermination(1)
    query.awaitTermination(3)  # it waits for rows now, and starts no job
    print("started", flush=True)
    sys.stdin.readline()
    assert query.isActive, query.exception()
    spark.stop()
    print("stopped", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
