"""Spans of handlers in actors, as an exporter in the actor gets them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

import ray_adapter
from keyshard import Connection, KeyShardSink, Message
from tests.ray.ray_topic import RayTopic

pytestmark = pytest.mark.ray


class Lines(SpanExporter):
    """Appends a line for each span to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with self._path.open("a") as file:
            for span in spans:
                file.write(f"{span.name} {span.context and span.context.span_id}\n")
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass


class Follow:
    """A handler that returns the facts of the current span.

    Its actor exports spans only after an hour, so all come from the export at the end.
    """

    def __init__(self, path: Path) -> None:
        provider = TracerProvider()
        processor = BatchSpanProcessor(Lines(path), schedule_delay_millis=3_600_000)
        provider.add_span_processor(processor)
        trace.set_tracer_provider(provider)

    def __call__(self, _given: Message | pa.RecordBatch) -> dict[str, Any]:
        span: Any = trace.get_current_span()
        return {
            "name": span.name,
            "id": span.context.span_id,
            "links": sorted(link.context.span_id for link in span.links),
            "rows": span.attributes.get("messaging.batch.message_count"),
            "broker": (span.attributes["server.address"], span.attributes["server.port"]),
            "subscription": span.attributes["messaging.destination.subscription.name"],
        }


@pytest.mark.parametrize("takes", ["messages", "arrow"])
def test_spans_in_actors_are_linked_to_producers_and_exported_before_the_end(
    orders: RayTopic, tmp_path: Path, takes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The URL of the cluster in memory has no host.
    monkeypatch.setattr(Connection, "address", ("broker.example", 6652))
    provider = TracerProvider()
    sent = []
    with KeyShardSink(orders.topic, service_url=orders.url) as sink:
        for key in ("a", "b", "c"):
            with provider.get_tracer("test").start_as_current_span("produce") as span:
                parent = trace.format_span_id(span.get_span_context().span_id)
                trace_id = trace.format_trace_id(span.get_span_context().trace_id)
                sent.append(span.get_span_context().span_id)
            properties = {"traceparent": f"00-{trace_id}-{parent}-01"}
            sink.send(b"x", key=key, properties=properties)
    source = replace(orders.source(), telemetry=True)
    path = tmp_path / "spans"
    told: list[dict[str, Any]] = []
    left = 3
    with ray_adapter.run(source, partial(Follow, path), parallelism=1, takes=takes) as job:
        for one in job:
            told.append(one)
            left -= one["rows"] or 1
            if not left:
                job.drain()
    assert sorted(link for one in told for link in one["links"]) == sorted(sent)
    assert {one["name"] for one in told} == {f"process {orders.topic}"}
    assert {one["subscription"] for one in told} == {source.subscription}
    assert {one["broker"] for one in told} == {("broker.example", 6652)}
    assert {one["rows"] is None for one in told} == {takes == "messages"}
    assert sorted(path.read_text().splitlines()) == sorted(
        f"{one['name']} {one['id']}" for one in told
    )
