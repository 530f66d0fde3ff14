"""Spans and metrics of OpenTelemetry, as an exporter gets them."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
import tenacity
from opentelemetry import metrics, propagate, trace
from opentelemetry.trace import SpanKind, StatusCode

from keyshard import Connection, KeyShardSink, KeyShardSource, Message, Produce, RetryPolicy
from keyshard.columns.content import PROPERTIES
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.errors import BrokerError, ConfigError
from keyshard.observe.telemetry import PlannedSpans, Telemetry
from keyshard.threads import begin
from tests.helpers import present, wait_until
from tests.support.copied_topic import Copied
from tests.support.deadlines import deadline
from tests.support.exported import Exported

pytestmark = pytest.mark.usefixtures("control_folder")

TWICE = RetryPolicy(wait=tenacity.wait_none(), stop=tenacity.stop_after_attempt(2))


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Exported:
    return Exported(monkeypatch)


def publish(copied: Copied, *keys: str) -> None:
    with KeyShardSink(copied.topic, service_url=copied.url, linger_ms=0, telemetry=True) as sink:
        for key in keys:
            sink.send(b"value", key=key, properties={"mine": "kept"})


def plain(message: Message) -> Produce:
    return Produce(message.value, key=message.key, properties={"mine": "kept"})


async def coroutine(message: Message) -> Produce:
    return plain(message)


@pytest.mark.parametrize(
    ("handle", "executor"), [(plain, "threads"), (coroutine, "async"), (plain, "processes")]
)
def test_a_message_is_followed_from_its_producer_to_the_outputs_of_its_handler(
    exported: Exported, handle: Any, executor: str
) -> None:
    copied = Copied()
    publish(copied, "a", "b")
    options: dict[str, Any] = {"executor": executor, "telemetry": True, "sink": copied.sink}
    if executor == "processes":
        options["workers"] = 1
    with copied.running(copied.source(), handle, **options) as run:
        wait_until(lambda: run.errors or copied.backlog() == 0)
    assert not copied.errors
    sent = exported.spans("send")
    processed = exported.spans("process")
    assert [span.kind for span in sent] == [SpanKind.PRODUCER] * 2
    assert [span.kind for span in processed] == [SpanKind.CONSUMER] * 2
    assert {span.name for span in processed} == {f"process {copied.topic}"}
    assert sorted(present(span.context).span_id for span in sent) == sorted(
        link.context.span_id for span in processed for link in span.links
    )
    attributes = dict(present(processed[0].attributes))
    assert attributes.pop("messaging.destination.partition.id") in {"0", "1"}
    assert attributes.pop("messaging.message.id")
    assert attributes == {
        "messaging.system": "pulsar",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": copied.topic,
        "messaging.destination.subscription.name": "keyshard",
    }
    created = exported.spans("create")
    assert sorted(present(span.parent).span_id for span in created) == sorted(
        present(span.context).span_id for span in processed
    )
    ids = {trace.format_span_id(present(span.context).span_id) for span in created}
    stored = copied.stored()
    assert {one.properties["traceparent"].split("-")[2] for one in stored} == ids
    assert {one.properties["mine"] for one in stored} == {"kept"}
    consumed = exported.points("messaging.client.consumed.messages")
    assert sum(point.value for point in consumed) == 2
    assert sum(point.count for point in exported.points("messaging.process.duration")) == 2
    assert sum(point.value for point in exported.points("messaging.client.sent.messages")) == 2


BROKER = {"server.address": "broker.example", "server.port": 6652}


def of_broker(attributes: Any) -> dict[str, Any]:
    return {name: attributes[name] for name in attributes if name.startswith("server.")}


def test_spans_and_metrics_name_the_host_of_the_service_url(
    exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The URL of the cluster in memory has no host.
    monkeypatch.setattr(Connection, "address", tuple(BROKER.values()))
    copied = Copied()
    publish(copied, "a")
    with KeyShardSink(
        copied.topic, service_url=copied.url, telemetry=True, delivery_guarantee="at-least-once"
    ) as sink:
        sink.write_batch(pa.record_batch({"value": [b"1"]}), 0)
    sent = exported.spans("send")
    with replace(copied.source(), telemetry=True).open() as stream:
        stream.commit(present(stream.next_batch(60)))
    batches = replace(copied.source(), telemetry=True).batches()
    publish(copied, "b")
    next(batches).ack()
    batches.close()
    publish(copied, "c")
    with copied.running(copied.source(), plain, telemetry=True, sink=copied.sink):
        wait_until(lambda: copied.backlog() == 0)
    processed = exported.spans("process")
    assert (len(sent), len(processed) >= 3) == (2, True)
    for span in sent + processed:
        assert of_broker(present(span.attributes)) == BROKER
    for metric in (
        "messaging.client.consumed.messages", "messaging.process.duration",
        "messaging.client.sent.messages", "messaging.client.operation.duration",
    ):  # fmt: skip
        assert all(of_broker(point.attributes) == BROKER for point in exported.points(metric))
    # The sink of a run may publish to another cluster.
    assert {tuple(of_broker(present(one.attributes))) for one in exported.spans("create")} == {()}


def test_a_failed_attempt_names_its_error(exported: Exported) -> None:
    copied = Copied()
    publish(copied, "a")
    attempts: list[Message] = []

    def handle(message: Message) -> None:
        attempts.append(message)
        if len(attempts) == 1:
            raise ValueError("not now")

    with copied.running(copied.source(), handle, telemetry=True, retry=TWICE):
        wait_until(lambda: copied.backlog() == 0)
    failed, succeeded = exported.spans("process")
    assert present(failed.attributes)["error.type"] == "ValueError"
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.events[0].name == "exception"
    assert "error.type" not in present(succeeded.attributes)
    points = exported.points("messaging.process.duration")
    assert sorted(point.attributes.get("error.type", "") for point in points) == ["", "ValueError"]


def test_a_message_without_a_context_has_no_link(exported: Exported) -> None:
    copied = Copied()
    copied.publish(keys=1, per_key=1)
    with copied.running(copied.source(), plain, telemetry=True, sink=copied.sink):
        wait_until(lambda: copied.backlog() == 0)
    (span,) = exported.spans("process")
    assert span.links == ()


def test_a_message_without_a_confirmation_is_an_error_of_its_span(exported: Exported) -> None:
    copied = Copied()
    copied.hold()
    with (
        suppress(KeyError),
        KeyShardSink(copied.out, service_url=copied.url, telemetry=True) as sink,
    ):
        future = sink.send(b"unconfirmed")
        raise KeyError  # The block ends without waiting for confirmations.
    error = future.exception(deadline(30))
    assert isinstance(error, BrokerError)
    wait_until(lambda: exported.spans("send"))
    (span,) = exported.spans("send")
    assert span.status.status_code is StatusCode.ERROR
    name = f"keyshard.errors.{type(error).__name__}"
    assert present(span.attributes)["error.type"] == name
    (point,) = exported.points("messaging.client.operation.duration")
    assert point.attributes["error.type"] == name


def test_a_message_of_a_coroutine_is_in_the_span_of_its_task(exported: Exported) -> None:
    copied = Copied()

    async def main() -> None:
        async with KeyShardSink(copied.out, service_url=copied.url, telemetry=True) as sink:
            with trace.get_tracer("test").start_as_current_span("task"):
                await sink.asend(b"value")

    asyncio.run(main())
    (sent,), (task,) = exported.spans("send"), exported.spans("task")
    assert present(sent.parent).span_id == present(task.context).span_id


def test_the_span_of_a_message_ends_when_its_future_is_cancelled(exported: Exported) -> None:
    copied = Copied()
    copied.hold()
    with (
        suppress(KeyError),
        KeyShardSink(copied.out, service_url=copied.url, telemetry=True) as sink,
    ):
        assert sink.send(b"unconfirmed").cancel()
        (span,) = exported.spans("send")
        assert span.status.status_code is StatusCode.ERROR
        raise KeyError  # The block ends without waiting for confirmations.


def test_a_batch_is_one_span_with_its_rows(exported: Exported) -> None:
    copied = Copied()
    rows = pa.record_batch({"value": [b"1", b"2", b"3"]})
    with KeyShardSink(
        copied.out, service_url=copied.url, telemetry=True, delivery_guarantee="at-least-once"
    ) as sink:
        sink.write_batch(rows, 0)
    (span,) = exported.spans("send")
    assert present(span.attributes)["messaging.batch.message_count"] == 3
    (point,) = exported.points("messaging.client.sent.messages")
    assert point.value == 3


def test_a_batch_of_a_source_is_one_span_until_it_is_acknowledged(exported: Exported) -> None:
    copied = Copied()
    publish(copied, *(f"k{number}" for number in range(200)))
    source = replace(copied.source(), telemetry=True)
    batches = source.batches(max_rows=200, max_wait_s=30)
    batch = next(batches)
    assert not exported.spans("process")
    with trace.use_span(present(batch.span)):
        trace.get_tracer("test").start_span("stored").end()
    batch.ack()
    batch.ack()
    batches.close()
    (span,) = exported.spans("process")
    assert (span.name, span.kind) == (f"process {copied.topic}", SpanKind.CONSUMER)
    assert span.status.status_code is StatusCode.UNSET
    assert present(span.attributes)["messaging.batch.message_count"] == 200
    sent = {present(one.context).span_id for one in exported.spans("send")}
    linked = {link.context.span_id for link in span.links}
    assert len(span.links) == len(linked) == 100  # of 128 at most: each second row
    assert linked < sent
    (child,) = exported.spans("stored")
    assert present(child.parent).span_id == present(span.context).span_id
    (consumed,) = exported.points("messaging.client.consumed.messages")
    assert consumed.value == 200


def test_the_span_of_a_batch_says_that_it_was_not_acknowledged(exported: Exported) -> None:
    copied = Copied()
    publish(copied, "a")
    batches = replace(copied.source(), telemetry=True).batches()
    next(batches)
    batches.close()
    (span,) = exported.spans("process")
    assert present(span.attributes)["error.type"] == "not_acknowledged"
    assert span.status.status_code is StatusCode.ERROR


def test_the_spans_of_a_stream_end_with_its_commits(exported: Exported) -> None:
    copied = Copied()
    publish(copied, "a")
    with replace(copied.source(), telemetry=True).open() as stream:
        batches = [present(stream.next_batch(60))]
        publish(copied, "b")
        batches.append(present(stream.next_batch(60)))
        stream.commit(batches[1])
        ids = [present(span.attributes)["keyshard.batch.id"] for span in exported.spans("process")]
        assert ids == [batch.end.batch_id for batch in batches]
        publish(copied, "c")
        assert stream.next_batch(60)
    *committed, open_one = exported.spans("process")
    assert [present(span.attributes).get("error.type") for span in committed] == [None, None]
    assert present(open_one.attributes)["error.type"] == "not_acknowledged"
    assert present(open_one.attributes)["messaging.batch.message_count"] == 1


def test_without_a_provider_nothing_is_done_for_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(propagate, "extract", asked.append)
    telemetry = Telemetry(None)
    properties = pa.array([[("a", "b")]], PROPERTIES)
    row = pa.record_batch({"__topic": ["t"], "__properties": properties})
    assert telemetry.processed_rows(lambda rows: rows, "s")(row) is row
    handle = telemetry.processed(lambda message: message, "s", None)
    message = Message.for_test(b"")
    assert handle(message) is message
    assert not asked


class ClosesMeanwhile(str):
    """An id of a batch. While it is compared, another thread closes the spans."""

    __slots__ = ("spans",)
    __hash__ = str.__hash__
    spans: PlannedSpans

    def __eq__(self, other: object) -> bool:
        closing = begin("closing", self.spans.close)
        closing.join(0.1)
        return str.__eq__(self, other)


def ending_at(batch_id: str) -> Checkpoint:
    return cast("Checkpoint", SimpleNamespace(batch_id=batch_id, partitions={}))


@pytest.mark.parametrize("looked_for", ["b", "new"])
def test_a_stream_may_be_closed_while_a_batch_begins_or_ends(
    exported: Exported, looked_for: str
) -> None:
    spans = PlannedSpans(KeyShardSource("t", subscription="s", service_url="memory://none"))
    for batch_id in "abc":
        spans.begin(ending_at(batch_id))
    batch_id = ClosesMeanwhile(looked_for)
    batch_id.spans = spans
    spans.committed(batch_id)
    spans.begin(ending_at(batch_id))
    wait_until(lambda: len(exported.spans("process")) >= 3)


class Provider:
    """A provider whose export may fail or not end."""

    def __init__(self, export: Callable[[], object]) -> None:
        self._export = export
        self.ended = threading.Event()

    def force_flush(self, _timeout_ms: int) -> None:
        try:
            self._export()
        finally:
            self.ended.set()


def test_a_collector_that_does_not_answer_delays_no_stop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answered = threading.Event()
    telemetry, traces = Telemetry(None), Provider(lambda: answered.wait(deadline(60)))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: traces)
    telemetry.flush(0.01)
    assert not traces.ended.is_set()
    assert "has not exported the newest spans and metrics within 0.01 s" in caplog.text
    answered.set()
    assert traces.ended.wait(deadline(60))


def test_a_failed_export_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise Exception("no collector")

    telemetry, traces, meters = Telemetry(None), Provider(fail), Provider(lambda: None)
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: traces)
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: meters)
    telemetry.flush(60)
    assert "cannot export the newest spans or metrics: no collector" in caplog.text
    assert meters.ended.is_set()


def test_telemetry_without_its_package_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"Install keyshard\[otel\]"):
        KeyShardSink("t", service_url="memory://none", telemetry=True)
    source = KeyShardSource("t", subscription="s", service_url="memory://none")
    with pytest.raises(ConfigError, match=r"Install keyshard\[otel\]"):
        source.run(plain, telemetry=True)
    followed = replace(source, telemetry=True)
    for start in (lambda: followed.run(plain), followed.batches, followed.open):
        with pytest.raises(ConfigError, match=r"Install keyshard\[otel\]"):
            start()
