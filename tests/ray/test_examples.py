"""The examples with Ray, on a real broker and the Ray of these tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import Workload, create_partitioned_topic, produce

pytestmark = [pytest.mark.ray, pytest.mark.broker, pytest.mark.timeout(180)]
ROOT = Path(__file__).parents[2]
LOAD = Workload(2_000, keys=40)


@pytest.fixture(scope="module")
def orders(dev_broker: DevBroker) -> tuple[str, dict[str, int]]:
    """A topic, and how many messages each key has."""
    create_partitioned_topic(dev_broker.admin_url, "ray-orders", 3)
    return "ray-orders", dict(produce(LOAD, dev_broker.service_url, "ray-orders").per_key)


def run(broker: DevBroker, *arguments: str) -> str:
    """What an example prints."""
    address = ray.get_runtime_context().gcs_address
    done = subprocess.run(
        [sys.executable, "-m", *arguments, "--service-url", broker.service_url],
        cwd=ROOT, env={**os.environ, "RAY_ADDRESS": address}, check=False, timeout=150,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_count_per_key(dev_broker: DevBroker, orders: tuple[str, dict[str, int]]) -> None:
    topic, sent = orders
    out = run(dev_broker, "examples.ray_count", topic, "--messages", str(LOAD.messages))
    counted = dict(line.split() for line in out.splitlines() if line.startswith("k"))
    assert {key: int(count) for key, count in counted.items()} == sent


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
