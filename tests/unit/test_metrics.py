"""The table of metrics, its document, and the answer to Prometheus."""

from __future__ import annotations

import math
import os
import re
import signal
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from keyshard.core.lanes.lane_status import BOUNDS_S, LatencyHistogram
from keyshard.core.range_watchdog import RangeState
from keyshard.core.rescale_history import RescaleEnd
from keyshard.errors import ConfigError, ThreadStartError
from keyshard.handlers.executors import shared_slots
from keyshard.observe import metrics_server
from keyshard.observe.metrics import METRICS, MetricKind, document
from keyshard.observe.metrics_server import MetricsServer
from keyshard.observe.status_types import Status
from keyshard.threads import begin
from keyshard.version import VERSION
from tests.helpers import wait_until
from tests.support.statuses import (
    handler_slots,
    lag,
    metrics_of,
    partition_status,
    progress,
    range_status,
    status,
)

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def scrape(server: MetricsServer) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = httpx.get(f"http://127.0.0.1:{server.port}/metrics", trust_env=False).text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.pop("subscription") == "s"
    }


def serve(
    status: Callable[[], Status],
    live: str = "",
    ready: str = "",
    host: str = "127.0.0.1",
    port: int = 0,
) -> MetricsServer:
    return MetricsServer(host, port, status, lambda: live, lambda: ready)


def test_probes_have_a_reason_and_other_paths_are_not_found() -> None:
    for host, url in [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]"), ("0.0.0.0", "127.0.0.1")]:  # noqa: S104
        server = serve(status, ready="The source is starting.", host=host)
        try:
            output = {
                path: httpx.get(f"http://{url}:{server.port}{path}", trust_env=False)
                for path in ("/livez", "/readyz?verbose", "/healthz", "/", "/metrics/", "/metrics")
            }
        finally:
            server.close()
        assert [answer.status_code for answer in output.values()] == [200, 503, 404, 404, 404, 200]
        assert output["/livez"].text == "ok\n"
        assert output["/readyz?verbose"].text == "The source is starting.\n"
        assert "/readyz" in output["/healthz"].text


def test_a_forked_child_leaves_the_server_to_its_parent() -> None:
    """Issue: a child that left its ``with`` block waited for a thread that it does not have."""
    server = serve(status)
    child = os.fork()
    if not child:
        try:
            server.close()
        finally:
            os._exit(0)
    try:
        wait_until(lambda: os.waitpid(child, os.WNOHANG)[0])
        child = 0
        assert scrape(server)[("keyshard_ranges", ())] == 2
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        server.close()


def test_while_a_source_starts_unknown_metrics_are_missing() -> None:
    server = serve(lambda: status(state="starting", ranges=[], partitions=[], window=None))
    try:
        samples = scrape(server)
    finally:
        server.close()
    assert ("keyshard_ranges", ()) not in samples
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
    timings = LatencyHistogram()
    for seconds in (0.0005, 0.004, 100.0):
        timings.add(seconds)
    now = status(
        ranges=[
            range_status(
                0,
                state="stalled",
                waiting=7,
                inFlight=2,
                stalled={"forSeconds": 7.5, "kind": "handler", "reason": "it has not returned"},
            ),
            range_status(1, oldestUnacknowledgedMillis=1_500),
        ],
        partitions=[
            partition_status(
                0,
                lag=lag(seconds=1.5),
                backlog=12,
                ackGaps=3,
                ackGapsMax=10_000,
                replay=4,
                replayMax=9,
            ),
            partition_status(1, covered=False),
        ],
        parkedKeys=1,
        lag=lag(seconds=2.5),
        window=progress()
        | {
            "rowsReceived": 40,
            "sourceWorkers": [
                {
                    "kind": "processes",
                    "pid": 7,
                    "host": "here",
                    "consumers": 3,
                    "forSeconds": 1.0,
                    "restarts": 1,
                },
                {
                    "kind": "processes",
                    "pid": None,
                    "host": None,
                    "consumers": 0,
                    "forSeconds": 1.0,
                    "restarts": 2,
                },
            ],
        },
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
        ("keyshard_range_stalled_seconds", (("kind", "handler"), ("range", "0"))): 7.5,
        ("keyshard_range_state", (("range", "0"), ("state", "stalled"))): 1,
        ("keyshard_range_state", (("range", "0"), ("state", "idle"))): 0,
        ("keyshard_partition_backlog_entries", (("partition", "0"), where)): 12,
        ("keyshard_partition_ack_gaps_limit", (("partition", "0"), where)): 10_000,
        ("keyshard_partition_covered", (("partition", "1"), where)): 0,
        ("keyshard_parked_keys", ()): 1,
        ("keyshard_lag_seconds", ()): 2.5,
        ("keyshard_partition_lag_seconds", (("partition", "0"), where)): 1.5,
        ("keyshard_uptime_seconds", ()): 3,
        ("keyshard_messages_received_total", ()): 40,
        ("keyshard_worker_up", (("kind", "processes"), ("worker", "0"))): 1,
        ("keyshard_worker_up", (("kind", "processes"), ("worker", "1"))): 0,
        ("keyshard_worker_consumers", (("kind", "processes"), ("worker", "0"))): 3,
        ("keyshard_worker_restarts_total", (("kind", "processes"), ("worker", "1"))): 2,
        ("keyshard_messages_completed_total", ()): 41,
        ("keyshard_messages_rejected_total", ()): 2,
        ("keyshard_handler_seconds_count", ()): 3,
        ("keyshard_handler_seconds_bucket", (("le", "0.005"),)): 2,
        ("keyshard_handler_seconds_bucket", (("le", "30.0"),)): 2,
        ("keyshard_handler_seconds_bucket", (("le", "+Inf"),)): 3,
    }
    assert {key: samples.get(key) for key in expected} == expected
    (build,) = (dict(labels) for name, labels in samples if name == "keyshard_build_info")
    assert (build["version"], build["transport"], build["decoder"]) == (VERSION, "wire", "compiled")
    # Unknown values are missing, rather than 0.
    assert not [each for each in samples if ("range", "1") in each[1] and "stalled_" in each[0]]
    assert ("keyshard_range_oldest_unacknowledged_seconds", (("range", "0"),)) not in samples
    assert ("keyshard_partition_backlog_entries", (("partition", "1"), where)) not in samples


def test_slots_of_handlers_are_served_by_process_or_actor() -> None:
    actor = handler_slots(
        1, hashRange="0-65535", state="busy", used=1, waiting=5, inFlight=3, runningSeconds=2.5,
        handled=40, restarts=2, untakenCalls=1,
        stalled={"forSeconds": 9.5, "kind": "actor", "reason": "a call has not returned"},
    )  # fmt: skip
    shown = {"handlerSlots": [handler_slots(0, state="starting", pid=None), actor]}
    values = {
        "slots": (1, 1), "slots_used": (0, 1), "up": (0, 1), "restarts_total": (0, 2),
        "messages_total": (0, 40), "waiting_messages": (None, 5), "in_flight_messages": (0, 3),
        "running_seconds": (None, 2.5), "untaken_calls": (None, 1), "stalled_seconds": (None, 9.5),
    }  # fmt: skip
    assert of_handlers(shown) == {
        (f"keyshard_handler_{name}", str(process)): value
        for name, both in values.items()
        for process, value in enumerate(both)
        if value is not None
    }


def test_threads_share_slots_and_have_no_process_of_their_own() -> None:
    threads = {"handlerSlots": shared_slots(4, 3)}
    assert of_handlers(threads) == {
        ("keyshard_handler_slots", "0"): 4,
        ("keyshard_handler_slots_used", "0"): 3,
        ("keyshard_handler_in_flight_messages", "0"): 3,
    }
    coroutines = {"handlerSlots": shared_slots(math.inf, 3)}
    assert ("keyshard_handler_slots", "0") not in of_handlers(coroutines)
    assert of_handlers({"handlerSlots": []}) == {}


def of_handlers(shown: dict[str, Any]) -> dict[tuple[str, str], float]:
    """Return the metrics of processes and actors, by name and process."""
    families = text_string_to_metric_families(metrics_of(status(**shown)))
    samples = [sample for family in families for sample in family.samples]
    return {
        (one.name, one.labels["process"]): one.value for one in samples if "process" in one.labels
    }


def test_the_document_states_the_largest_number_of_time_series() -> None:
    lines = re.search(r"bound the number of time series: at most ([^.]*)\.", DOCS.read_text())
    stated = list(map(int, re.findall(r"\d+", lines[1] if lines else "")))
    labels = Counter(metric.labels[0] if metric.labels else "" for metric in METRICS)
    states, histogram = len(RangeState) - 1, len(BOUNDS_S) + 2
    others = labels[""] + labels["version"] + histogram + len(RescaleEnd)
    each = [labels["range"] + states, labels["topic"], labels["worker"], labels["process"]]
    assert stated[:4] == each
    assert others <= stated[4]


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


def test_a_server_whose_thread_does_not_start_frees_its_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sockets: list[socket.socket] = []

    def fail(_name: str, call: Any, *_: Any) -> None:
        sockets.append(call.__self__.socket)
        raise ThreadStartError("no thread")

    monkeypatch.setattr(metrics_server, "begin", fail)
    with pytest.raises(ThreadStartError):
        serve(status)
    assert [one.fileno() for one in sockets] == [-1]


def test_requests_without_a_thread_take_no_place_of_later_ones(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each kept its place, so after 16 of them the port answered nobody."""
    server = serve(status)

    def refused(name: str, *_: Any) -> None:
        raise ThreadStartError(f"Thread {name} cannot be started: no room.")

    try:
        url = f"http://127.0.0.1:{server.port}/livez"
        monkeypatch.setattr(metrics_server, "begin", refused)
        for _ in range(metrics_server.REQUESTS_MAX):
            with pytest.raises(httpx.TransportError):
                httpx.get(url, trust_env=False)
        assert "cannot be started" in caplog.text
        assert {record.levelname for record in caplog.records} == {"WARNING"}
        monkeypatch.setattr(metrics_server, "begin", begin)
        assert httpx.get(url, trust_env=False).status_code == httpx.codes.OK
    finally:
        server.close()


def test_timings_count_each_duration_in_the_buckets_that_hold_it() -> None:
    timings = LatencyHistogram()
    for seconds in (0.0, BOUNDS_S[0], 0.02, 31.0):
        timings.add(seconds)
    output = timings.status()
    assert (output["count"], output["sum"]) == (4, pytest.approx(31.0205))
    assert output["buckets"] == [[bound, 2 if bound < 0.02 else 3] for bound in BOUNDS_S]
