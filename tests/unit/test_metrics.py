"""The table of metrics, its document, and what Prometheus gets."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from keyshard.core.lanes.timings import BOUNDS_S, Timings
from keyshard.errors import ConfigError
from keyshard.observe.metrics import METRICS, MetricKind, document
from keyshard.observe.metrics_server import MetricsServer
from statuses import partition_status, range_status, status

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def scrape(server: MetricsServer) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = httpx.get(f"http://127.0.0.1:{server.port}/metrics", trust_env=False).text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def serve(
    status: Callable[[], dict[str, Any]],
    live: str = "",
    ready: str = "",
    host: str = "127.0.0.1",
    port: int = 0,
) -> MetricsServer:
    return MetricsServer(host, port, status, lambda: live, lambda: ready)


def test_probes_say_why_and_other_paths_are_not_found() -> None:
    for host, url in [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]"), ("0.0.0.0", "127.0.0.1")]:  # noqa: S104
        server = serve(status, ready="The source is starting.", host=host)
        try:
            told = {
                path: httpx.get(f"http://{url}:{server.port}{path}", trust_env=False)
                for path in ("/livez", "/readyz?verbose", "/healthz", "/", "/metrics/", "/metrics")
            }
        finally:
            server.close()
        assert [answer.status_code for answer in told.values()] == [200, 503, 404, 404, 404, 200]
        assert told["/livez"].text == "ok\n"
        assert told["/readyz?verbose"].text == "The source is starting.\n"
        assert "/readyz" in told["/healthz"].text


def test_while_a_source_starts_what_is_not_known_is_missing() -> None:
    server = serve(lambda: status(state="starting", ranges=[], partitions=[], window=None))
    try:
        samples = scrape(server)
    finally:
        server.close()
    assert samples[("keyshard_ranges", ())] == 0
    assert ("keyshard_window_messages", ()) not in samples


def test_the_document_is_that_of_the_table() -> None:
    assert DOCS.read_text() == document(), (
        "write it: python -m keyshard.observe.metrics > docs/metrics.md"
    )


def test_names_follow_the_rules_of_prometheus() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"keyshard_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER)
        assert metric.unit != "seconds" or metric.name.endswith("_seconds")
        assert metric.help.endswith(".")


def test_every_metric_is_served_with_the_values_of_the_status() -> None:
    timings = Timings()
    for seconds in (0.0005, 0.004, 100.0):
        timings.add(seconds)
    now = status(
        ranges=[
            range_status(0, state="stalled", waiting=7, inFlight=2),
            range_status(1, oldestUnacknowledgedMillis=1_500),
        ],
        partitions=[
            partition_status(0, backlog=12, ackHoles=3, ackHolesMax=10_000, replay=4, replayMax=9),
            partition_status(1, covered=False),
        ],
        parkedKeys=1,
        handlerSeconds=timings.status(),
        counters=status()["counters"] | {"completed": 41, "rejected": 2},
    )
    server = serve(lambda: now)
    try:
        samples = scrape(server)
    finally:
        server.close()
    where = ("topic", "persistent://public/default/t")
    expected: dict[Any, float] = {
        ("keyshard_ranges", ()): 2,
        ("keyshard_lanes", ()): 16,
        ("keyshard_range_waiting_messages", (("range", "0"),)): 7,
        ("keyshard_range_in_flight_messages", (("range", "0"),)): 2,
        ("keyshard_range_oldest_unacknowledged_seconds", (("range", "1"),)): 1.5,
        ("keyshard_range_state", (("range", "0"), ("state", "stalled"))): 1,
        ("keyshard_range_state", (("range", "0"), ("state", "idle"))): 0,
        ("keyshard_partition_backlog_entries", (("partition", "0"), where)): 12,
        ("keyshard_partition_ack_holes_limit", (("partition", "0"), where)): 10_000,
        ("keyshard_partition_covered", (("partition", "1"), where)): 0,
        ("keyshard_parked_keys", ()): 1,
        ("keyshard_messages_completed_total", ()): 41,
        ("keyshard_messages_rejected_total", ()): 2,
        ("keyshard_handler_seconds_count", ()): 3,
        ("keyshard_handler_seconds_bucket", (("le", "0.005"),)): 2,
        ("keyshard_handler_seconds_bucket", (("le", "30.0"),)): 2,
        ("keyshard_handler_seconds_bucket", (("le", "+Inf"),)): 3,
    }
    assert {key: samples.get(key) for key in expected} == expected
    # What is not known is missing, rather than 0.
    assert ("keyshard_range_oldest_unacknowledged_seconds", (("range", "0"),)) not in samples
    assert ("keyshard_partition_backlog_entries", (("partition", "1"), where)) not in samples


def test_a_server_leaves_no_global_state_and_frees_its_port() -> None:
    before = set(REGISTRY._names_to_collectors)
    first, second = serve(status), serve(status)
    assert set(REGISTRY._names_to_collectors) == before
    with pytest.raises(ConfigError, match="metrics_port"):
        serve(status, port=first.port)
    with pytest.raises(ConfigError, match="metrics_host"):
        serve(status, host="192.0.2.1")
    for server in (first, second):
        server.close()
        server.close()
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", server.port)) != 0


def test_timings_count_each_duration_in_the_buckets_that_hold_it() -> None:
    timings = Timings()
    for seconds in (0.0, BOUNDS_S[0], 0.02, 31.0):
        timings.add(seconds)
    told = timings.status()
    assert (told["count"], told["sum"]) == (4, pytest.approx(31.0205))
    assert dict(map(tuple, told["buckets"])) == {
        bound: 2 if bound < 0.02 else 3 for bound in BOUNDS_S
    }
