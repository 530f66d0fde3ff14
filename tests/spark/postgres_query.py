"""The query into PostgreSQL. It pauses between the transaction of batch 1 and its commit.

test_examples.py runs it as a process, and kills it there. KEYSHARD_TEST_POSTGRES holds the
connection string.
"""

from __future__ import annotations

import argparse
import os
import threading

from pyspark.sql import DataFrame

from examples import to_postgres
from examples.parquet_query import session

SELECT = ["__key as customer", "cast(value as string) as content", "__publishTime as published"]
TABLE = "shop.orders"
STANDS_AT = 1
STANDS_S = 300.0
"""Longest time until the test kills this process, seconds."""
write = to_postgres.write


def write_and_stand(batch: DataFrame, number: int, postgres: str, table: str) -> None:
    """Write a batch. After batch STANDS_AT, wait until the test kills this process."""
    write(batch, number, postgres, table)
    if number == STANDS_AT:
        threading.Event().wait(STANDS_S)
        raise TimeoutError("not killed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint")
    parser.add_argument("--option", action="append")
    arguments, _ = parser.parse_known_args()
    to_postgres.write = write_and_stand
    options = dict(option.split("=", 1) for option in arguments.option)
    url = os.environ["KEYSHARD_TEST_POSTGRES"]
    to_postgres.start(
        session(), options, SELECT, arguments.checkpoint, postgres=url, table=TABLE
    ).awaitTermination()
