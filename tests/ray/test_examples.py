"""The examples with Ray, on a real broker and the Ray of these tests."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from itertools import accumulate
from pathlib import Path

import pytest
import ray

from keyshard.broker.memory import Batching
from keyshard.broker.memory import Message as Stored
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import Workload, create_partitioned_topic, produce
from tests.contract.pulsar_harness import PulsarHarness
from tests.contract.raw_protocol import RawEntry
from tests.ray.test_write import topic_of
from tests.support.deadlines import deadline
from tests.support.stored_topic import admin_of, messages_of_topic

pytestmark = [pytest.mark.ray, pytest.mark.broker]
ROOT = Path(__file__).parents[2]
LOAD = Workload(2_000, keys=40)


@pytest.fixture(scope="module")
def orders(dev_broker: DevBroker) -> tuple[str, dict[str, int]]:
    """A topic, and how many messages each key has."""
    create_partitioned_topic(dev_broker.admin_url, "ray-orders", 3)
    return "ray-orders", dict(produce(LOAD, dev_broker.service_url, "ray-orders").per_key)


def run(broker: DevBroker, *arguments: str) -> str:
    """Return the output of an example."""
    address = ray.get_runtime_context().gcs_address
    done = subprocess.run(
        [sys.executable, "-m", *arguments, "--service-url", broker.service_url],
        cwd=ROOT, env={**os.environ, "RAY_ADDRESS": address}, check=False, timeout=deadline(150),
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_counts_the_messages_of_each_key(
    dev_broker: DevBroker, orders: tuple[str, dict[str, int]]
) -> None:
    topic, sent = orders
    out = run(dev_broker, "examples.ray_count", topic, "--messages", str(LOAD.messages))
    counted = dict(line.split() for line in out.splitlines() if line.startswith("k"))
    assert {key: int(count) for key, count in counted.items()} == sent


def test_the_example_trains_only_on_the_orders_of_yesterday(dev_broker: DevBroker) -> None:
    """Orders of the days before and after have other prices."""
    midnight = datetime.now(timezone.utc).replace(hour=0, minute=0, second=0, microsecond=0)
    midnight_ms, day_ms = round(midnight.timestamp()) * 1000, 86_400_000
    harness = PulsarHarness(dev_broker.service_url, dev_broker.admin_url)
    topic = harness.create_topic(2)
    for partition in range(2):
        entries: list[RawEntry] = []
        for day, price in ((-2, 99.0), (-1, 10.0), (0, 55.0)):
            for number in range(150):
                order: dict[str, float] = {"items": number % 5, "express": bool(number % 2)}
                order["total"] = price * order["items"] + 4.5 * order["express"] + 3.0
                time_ms = midnight_ms + day * day_ms + number * (day_ms // 150)
                entries.append(({3: time_ms, 6: b"k"}, json.dumps(order).encode()))
        harness.publish_raw(f"{topic}-partition-{partition}", entries)
    harness.close()
    out = run(dev_broker, "examples.ray_yesterday", topic, "--admin-url", dev_broker.admin_url)
    assert f"300 orders on {midnight - timedelta(days=1):%Y-%m-%d}" in out
    learned = re.search(r"total = (\S+) \* items \+ (\S+) \* express \+ (\S+)", out)
    assert learned is not None
    for weight, truth in zip(map(float, learned.groups()), (10.0, 4.5, 3.0), strict=True):
        assert abs(weight - truth) < 0.3, out


def test_score_in_key_order(
    dev_broker: DevBroker, orders: tuple[str, dict[str, int]], tmp_path: Path
) -> None:
    topic, sent = orders
    weights, keep = {"0": 1.5, "1": -0.5}, 0.9
    model, out = tmp_path / "model.json", tmp_path / "scores.txt"
    model.write_text(json.dumps({"weights": weights, "keep": keep}))
    run(
        dev_broker, "examples.ray_score", topic, "--model", str(model), "--out", str(out),
        "--checkpoint", str(tmp_path / "c.json"), "--messages", str(LOAD.messages),
    )  # fmt: skip
    scores: dict[str, list[str]] = {}
    for line in out.read_text().splitlines():
        key, _, score = line.split()
        scores.setdefault(key, []).append(score)
    for key, count in sent.items():
        last, expected = 0.0, []
        for seq in range(count):
            value = f"{key}:{seq}:"
            last = sum(weights.get(one, 0.0) for one in value) + keep * last
            expected.append(f"{last:.6f}")
        assert scores[key] == expected


def test_the_example_writes_a_dataset_to_a_topic(dev_broker: DevBroker) -> None:
    with admin_of(dev_broker) as admin:
        totals = topic_of(admin, deduplicate=True)
    harness = PulsarHarness(dev_broker.service_url, dev_broker.admin_url)
    orders = harness.create_topic(2)
    numbers = [(f"c{customer}", number) for number in range(30) for customer in range(12)]
    harness.publish(
        orders,
        [
            Stored(json.dumps({"number": number, "total": number + 0.5}).encode(), key=customer)
            for customer, number in numbers
        ],
        Batching.BY_KEY,
    )
    harness.close()
    out = run(
        dev_broker, "examples.ray_publish", orders, totals, "--admin-url", dev_broker.admin_url
    )
    assert f"360 rows in 12 entries of {totals}" in out
    found: dict[str | None, list[dict[str, float]]] = {}
    for one in messages_of_topic(dev_broker.service_url, totals):
        found.setdefault(one.key, []).append(json.loads(one.value or b""))
    spent = list(accumulate(number + 0.5 for number in range(30)))
    expected = [{"number": number, "spent": spent[number]} for number in range(30)]
    assert found == {f"c{customer}": expected for customer in range(12)}
