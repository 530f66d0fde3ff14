"""Writes each row of a topic to a PostgreSQL table exactly once, even if any process is killed.

    python -m examples.to_postgres --postgres "host=/run/postgresql dbname=shop" --table orders \
        --select "__key as customer" --select "cast(value as string) as content" --checkpoint ck \
        --option service.url=pulsar://127.0.0.1:6650 --option topic=orders \
        --option subscription=shop --option startingOffsets=earliest

The table must exist, with columns of the selected names. It needs no unique key, because each batch
is one transaction that also writes the batch number and the query's id. After a kill, Spark runs
its last batch again. keyshard returns the same rows, and this program skips a batch that is already
written. The id is in Spark's checkpoint: with a new checkpoint, batch numbers start again under a
new id.

One transaction is one connection. So the driver writes, with COPY, and holds the rows of one Spark
partition at a time: ``maxOffsetsPerTrigger`` divided by ``tasksPerBatch``. If tasks wrote, each
would have its own transaction, and rows of failed tasks would need staging tables. A column
``generated always as identity`` numbers the rows. The numbers of a key's rows follow their order in
the topic partition.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Any

import psycopg
from psycopg import sql
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from examples.parquet_query import session

WRITTEN = """
create table if not exists keyshard_batches (query text primary key, batch bigint not null)
"""
# A previous run that has not ended yet holds the row until its transaction ends. Then either its
# batch or this one is skipped.
CLAIM = """
insert into keyshard_batches as last values (%s, %s)
on conflict (query) do update set batch = excluded.batch where last.batch < excluded.batch
returning batch
"""


def write(batch: DataFrame, number: int, postgres: str, table: str) -> None:
    """Write a batch and its number in one transaction; skip a batch that is already written."""
    query = batch.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
    names = sql.SQL(", ").join(map(sql.Identifier, batch.columns))
    into = sql.SQL("copy {} ({}) from stdin").format(sql.Identifier(*table.split(".")), names)
    rows = 0
    with psycopg.connect(postgres) as connection, connection.cursor() as cursor:
        cursor.execute("set local lock_timeout = '60s'")
        if cursor.execute(CLAIM, (query, number)).fetchone() is None:
            print(f"batch {number} was already written", flush=True)
            return
        with cursor.copy(into) as copy:
            for row in batch.toLocalIterator():
                copy.write_row(list(map(_with_zone, row)))
                rows += 1
    print(f"batch {number}: {rows} rows", flush=True)


def _with_zone(value: Any) -> Any:
    """Add the zone to a time: Spark returns local times, and the server may have another zone."""
    return value.astimezone() if isinstance(value, datetime) else value


def start(
    spark: SparkSession, options: dict[str, str], select: Sequence[str], checkpoint: str, *,
    postgres: str, table: str, available_now: bool = False,
) -> StreamingQuery:  # fmt: skip
    """Start the query, which runs forever or, with ``available_now``, until the backlog is read."""
    with psycopg.connect(postgres) as connection:
        connection.execute(WRITTEN)
    return (
        spark.readStream.format("keyshard")
        .options(**options)
        .load()
        .selectExpr(*select)
        .writeStream.foreachBatch(partial(write, postgres=postgres, table=table))
        .option("checkpointLocation", checkpoint)
        .trigger(**({"availableNow": True} if available_now else {"processingTime": "1 second"}))
        .start()
    )


def main() -> None:
    """Run the query until it ends, fails or is stopped."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--postgres", required=True, help="connection string of libpq")
    parser.add_argument("--table", required=True, help="table, with or without its schema")
    parser.add_argument("--select", action="append", required=True, metavar="EXPRESSION as COLUMN")
    parser.add_argument("--checkpoint", required=True, help="directory of the Spark checkpoint")
    parser.add_argument(
        "--available-now", action="store_true", help="end after the stored messages"
    )
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE")
    arguments = parser.parse_args()
    options = dict(option.split("=", 1) for option in arguments.option)
    query = start(
        session(), options, arguments.select, arguments.checkpoint, postgres=arguments.postgres,
        table=arguments.table, available_now=arguments.available_now,
    )  # fmt: skip
    query.awaitTermination()


if __name__ == "__main__":
    main()
