"""Read a topic into a Ray dataset, compute on it, and write the results to another topic.

::

    python -m examples.ray_publish public/shop/orders public/shop/totals \\
        --admin-url http://127.0.0.1:8080

A message of topic ``orders`` has a customer as key and a JSON value such as
``{"number": 7, "total": 9.5}``; the orders of a customer are numbered. Each becomes the customer's
running total, in this order. The broker has to deduplicate ``totals``: then each row is stored
once, whichever workers die.
"""

from __future__ import annotations

import argparse
import json

import pyarrow as pa
from ray.data import Dataset

import ray_adapter
from keyshard import Connection, KeyShardSink, KeyShardSource

BLOCKS = 4
"""Parts of the dataset after the shuffle; each has all orders of its customers."""


def parsed(rows: pa.Table) -> pa.Table:
    """Return customers, and numbers and totals of their orders."""
    orders = [json.loads(value) for value in rows["value"].to_pylist()]
    return pa.table(
        {
            "__key": rows["__key"],
            "number": [order["number"] for order in orders],
            "total": [float(order["total"]) for order in orders],
        }
    )


def running_totals(rows: pa.Table) -> pa.Table:
    """Return the messages to write, for all orders of some customers."""
    rows = rows.sort_by([("__key", "ascending"), ("number", "ascending")])
    spent: dict[str, float] = {}
    values = []
    for row in rows.to_pylist():
        customer = row["__key"]
        spent[customer] = spent.get(customer, 0.0) + row["total"]
        values.append(json.dumps({"number": row["number"], "spent": round(spent[customer], 2)}))
    return pa.table({"value": values, "__key": rows["__key"], "number": rows["number"]})


def totals_of(orders: Dataset) -> Dataset:
    """Return the running totals of a dataset of orders."""
    shuffled = orders.map_batches(parsed, batch_format="pyarrow").repartition(
        BLOCKS, keys=["__key"]
    )
    return shuffled.map_batches(running_totals, batch_format="pyarrow", batch_size=None)


def main() -> None:
    """Read, compute, write; print the counts of the write."""
    parser = argparse.ArgumentParser(prog="python -m examples.ray_publish", description=__doc__)
    parser.add_argument("orders")
    parser.add_argument("totals")
    parser.add_argument("--service-url", default="pulsar://127.0.0.1:6650")
    parser.add_argument("--admin-url", default="http://127.0.0.1:8080")
    arguments = parser.parse_args()
    connection = Connection(arguments.service_url, admin_url=arguments.admin_url)
    source = KeyShardSource(arguments.orders, connection=connection)
    orders = ray_adapter.read(source, columns=["__key", "value"])
    sink = KeyShardSink(arguments.totals, connection=connection)
    report = ray_adapter.write(totals_of(orders), sink, order_by="number")
    print(f"{report.rows} rows in {report.entries} entries of {arguments.totals}")


if __name__ == "__main__":
    main()
