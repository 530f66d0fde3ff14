"""Read yesterday's messages into a Ray dataset by their publish times, and train a model on it.

::

    python -m examples.ray_yesterday sales --admin-url http://127.0.0.1:8080

A message of topic ``sales`` is JSON such as ``{"items": 3, "express": true, "total": 31.5}``. The
model predicts ``total`` from the other two fields. Nothing is acknowledged: run it as often as you
like, beside the consumers of the topic. ``--day 2026-11-20`` reads another day, in UTC.
"""

from __future__ import annotations

import argparse
import json
from datetime import datetime, timedelta, timezone

import numpy as np
import pyarrow as pa
from ray.data import Dataset

import ray_adapter
from keyshard import KeyShardSource

EPOCHS, RATE = 60, 0.15


def features(rows: pa.RecordBatch | pa.Table) -> pa.Table:
    """Return the columns to learn from: two inputs, and the total."""
    orders = [json.loads(value) for value in rows.column("value").to_pylist()]
    return pa.table(
        {
            "items": [float(order["items"]) for order in orders],
            "express": [float(order["express"]) for order in orders],
            "total": [float(order["total"]) for order in orders],
        }
    )


def train(orders: Dataset) -> np.ndarray:
    """Return the weights of a linear model, trained by gradient descent over batches."""
    weights = np.zeros(3)
    for _ in range(EPOCHS):
        for batch in orders.iter_batches(batch_size=100, batch_format="numpy"):
            inputs = np.stack([batch["items"], batch["express"], np.ones(len(batch["total"]))], 1)
            error = inputs @ weights - batch["total"]
            weights -= RATE * inputs.T @ error / len(error)
    return weights


def main() -> None:
    """Print the number of orders of the day, and the model."""
    parser = argparse.ArgumentParser(prog="python -m examples.ray_yesterday", description=__doc__)
    parser.add_argument("topic")
    parser.add_argument("--service-url", default="pulsar://127.0.0.1:6650")
    parser.add_argument("--admin-url", default="http://127.0.0.1:8080")
    parser.add_argument("--day", help="day to read; default: yesterday")
    arguments = parser.parse_args()
    midnight = datetime.now(timezone.utc).replace(hour=0, minute=0, second=0, microsecond=0)
    day = midnight - timedelta(days=1)
    if arguments.day:
        day = datetime.strptime(arguments.day, "%Y-%m-%d").replace(tzinfo=timezone.utc)
    source = KeyShardSource(
        arguments.topic, service_url=arguments.service_url, admin_url=arguments.admin_url
    )
    rows = ray_adapter.read(
        source,
        start=day,
        end=day + timedelta(days=1),
        columns=["value"],
        disorder_max_s=3600,  # clocks are off by less, and nothing is sent again later
    )
    orders = rows.map_batches(features, batch_format="pyarrow").materialize()
    if not orders.count():
        raise SystemExit(f"{arguments.topic} has no messages of {day:%Y-%m-%d}.")
    items, express, base = train(orders)
    print(f"{orders.count()} orders on {day:%Y-%m-%d}")
    print(f"total = {items:.2f} * items + {express:.2f} * express + {base:.2f}")


if __name__ == "__main__":
    main()
