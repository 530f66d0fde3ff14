"""Metrics over HTTP of a Ray job, on the port of its driver."""

from __future__ import annotations

import logging
import re

import pytest

import ray_adapter
from tests.helpers import present, wait_until
from tests.ray.ray_topic import RayTopic, key_and_seq
from tests.support.scraped import get, samples, serves

pytestmark = pytest.mark.ray


def test_metrics_of_a_job_are_served_until_its_end(
    orders: RayTopic, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "keyshard.observe.monitor")
    count = orders.publish(keys=20, per_key=10)
    source = orders.source(metrics_port=0)
    with ray_adapter.run(source, key_and_seq, parallelism=2, max_rows=10) as job:
        (port,) = map(int, re.findall(r"metrics are served on 127.0.0.1, port (\d+)", caplog.text))
        results = iter(job)
        orders.taken += [next(results) for _ in range(count // 2)]
        wait_until(lambda: samples(port)["keyshard_messages_received_total"] == [count])
        # The results of a call are acknowledged with the next call.
        wait_until(
            lambda: samples(port)["keyshard_entries_acknowledged_total"] >= [count // 2 - 10]
        )
        found = samples(port)
        assert found["keyshard_workers"] == [2]
        assert found["keyshard_handler_slots"] == found["keyshard_handler_up"] == [1, 1]
        assert found["keyshard_attempts_failed_total"] == [0]
        assert "keyshard_circuit_open" not in found
        for probe in ("/livez", "/readyz"):
            assert (get(port, probe).status_code, get(port, probe).text) == (200, "ok\n")
        assert found["keyshard_messages_completed_total"] >= [count // 2]
        assert found["keyshard_handler_seconds_count"] >= [count // 2]
        assert sum(found["keyshard_handler_messages_total"]) >= count // 2
        orders.take(results, job)
    orders.check_taken()
    assert not serves(port)
    ended = job.status()["source"]
    assert ended["counters"]["completed"] == present(ended["handlerSeconds"])["count"] == count
