"""Spans and metrics of OpenTelemetry, as an exporter gets them."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.helpers import present


class Exported:
    """Spans and metrics that a program exports."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._spans, self._reader = InMemorySpanExporter(), InMemoryMetricReader()
        traces, meters = TracerProvider(), MeterProvider([self._reader])
        traces.add_span_processor(SimpleSpanProcessor(self._spans))
        # A process can set the global providers once only.
        monkeypatch.setattr(trace, "get_tracer", traces.get_tracer)
        monkeypatch.setattr(trace, "get_tracer_provider", lambda: traces)
        monkeypatch.setattr(metrics, "get_meter", meters.get_meter)
        monkeypatch.setattr(metrics, "get_meter_provider", lambda: meters)

    def spans(self, name: str = "") -> list[ReadableSpan]:
        found = [span for span in self._spans.get_finished_spans() if span.name.startswith(name)]
        return sorted(found, key=lambda span: present(span.start_time))

    def points(self, name: str) -> list[Any]:
        data = present(self._reader.get_metrics_data())
        return [
            point
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]
