"""Rows of a topic into a table of PostgreSQL, each exactly once, whatever is killed on the way.

    python -m examples.to_postgres --postgres "host=/run/postgresql dbname=shop" --table orders \
        --select "__key as customer" --select "cast(value as string) as content" --checkpoint ck \
        --option service.url=pulsar://127.0.0.1:6650 --option topic=orders \
        --option subscription=shop --option startingOffsets=earliest

The table exists, and has columns of the names that are selected. It needs no key of its own: each
batch is one transaction, which also writes the batch's number beside the query's id. After a kill
Spark runs its last batch again; keyshard gives it the same rows, so one that is written is skipped.
The id is in Spark's checkpoint: with a new checkpoint numbers begin anew, and so does the count.

One transaction is one connection, so the driver writes, by COPY, and holds the rows of one Spark
partition at a time: ``maxOffsetsPerTrigger`` divided by ``parallelism``. Tasks that write have a
transaction each; what a failed one leaves would have to be staged, told apart and moved. A column
``generated always as identity`` numbers the rows in order: per key, that of the topic partition.
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
# A run that is not quite dead holds the row until its transaction ends; then it is too late for it,
# or for this one.
CLAIM = """
insert into keyshard_batches as last values (%s, %s)
on conflict (query) do update set batch = excluded.batch where last.batch < excluded.batch
returning batch
"""


def write(batch: DataFrame, number: int, postgres: str, table: str) -> None:
    """One batch and its number, in one transaction; nothing if that was done before."""
    query = batch.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
    names = sql.SQL(", ").join(map(sql.Identifier, batch.columns))
    into = sql.SQL("copy {} ({}) from stdin").format(sql.Identifier(*table.split(".")), names)
    rows = 0
    with psycopg.connect(postgres) as connection, connection.cursor() as cursor:
        cursor.execute("set local lock_timeout = '60s'")
        if cursor.execute(CLAIM, (query, number)).fetchone() is None:
            print(f"batch {number} was written before", flush=True)
            return
        with cursor.copy(into) as copy:
            for row in batch.toLocalIterator():
                copy.write_row(list(map(_with_zone, row)))
                rows += 1
    print(f"batch {number}: {rows} rows", flush=True)


def _with_zone(value: Any) -> Any:
    """Spark gives times of this machine's zone, which the server need not have."""
    return value.astimezone() if isinstance(value, datetime) else value


def start(
    spark: SparkSession, options: dict[str, str], select: Sequence[str], checkpoint: str, *,
    postgres: str, table: str, available_now: bool = False,
) -> StreamingQuery:  # fmt: skip
    """The query, which goes on for ever, or ends with what is there when it starts."""
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
    parser.add_argument("--postgres", required=True, help="how to connect, as libpq takes it")
    parser.add_argument("--table", required=True, help="the table, with its schema or without")
    parser.add_argument("--select", action="append", required=True, metavar="EXPRESSION as COLUMN")
    parser.add_argument("--checkpoint", required=True, help="directory of Spark's checkpoint")
    parser.add_argument("--available-now", action="store_true", help="end with what is there now")
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
