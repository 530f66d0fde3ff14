"""The stream reader under the orders of calls that a recording of Spark 4.3 showed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from keyshard import Checkpoint
from keyshard.broker.memory import Message
from keyshard.columns.record_batches import SCHEMA
from keyshard.control import running_source, running_sources
from keyshard.coordinator.batch_reading import report_malformed
from keyshard.errors import (
    AsyncProgressError,
    BatchReleasedError,
    CheckpointMismatchError,
    UnexpectedError,
    UnsupportedTriggerError,
)
from spark_adapter import stream_runtime
from spark_adapter.stream_reader import KeyShardStreamReader
from spark_adapter.task_rows import Rows
from tests.helpers import present, wait_until
from tests.support.deadlines import deadline
from tests.support.exported import Exported
from tests.support.memory_topic import MemoryTopic

LIMIT = ReadMaxRows(20)


class Host:
    """Calls a reader as Spark does; each instance is one stream process."""

    def __init__(self, topic: MemoryTopic, **changes: Any) -> None:
        source = topic.source(subscription="unit", **changes)
        self.reader = KeyShardStreamReader(source, Rows(SCHEMA.names))

    def wait(self, rows: int) -> None:
        """Wait until this process has received a number of rows."""
        wait_until(lambda: self.reader._runtime.coordinator.status()["rowsReceived"] >= rows)  # type: ignore[union-attr]

    def values(self, start: dict[str, Any], end: dict[str, Any]) -> list[str]:
        """Plan and read the batch that ends at ``end``."""
        indices = [ticket.ticket.index for ticket in self.reader.partitions(start, end)]  # type: ignore[attr-defined]
        coordinator = self.reader._runtime.coordinator  # type: ignore[union-attr]
        batch_id = Checkpoint.from_dict(end).batch_id
        return [
            row["value"].decode()
            for index in indices
            for part in coordinator.batches.read(batch_id, index)
            for row in part.to_pylist()
        ]


def test_a_query_serves_metrics_until_it_stops(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)  # as in the stream process
    topic = MemoryTopic()
    host = Host(topic, metrics_port=0)
    topic.cluster.publish(topic.topic, *(Message(b"row", key=f"k{n}") for n in range(10)))
    host.reader.latestOffset(host.reader.initialOffset(), LIMIT)
    host.wait(10)
    port = present(present(host.reader._runtime).monitor.metrics_port)
    url = f"http://127.0.0.1:{port}/"
    try:
        assert f"metrics are served on port {port}" in caplog.text
        text = httpx.get(f"{url}metrics", trust_env=False).text
        labels = f'partition="1",subscription="unit",topic="{topic.topic}"'
        for line in (
            'keyshard_messages_received_total{subscription="unit"} 10.0',
            f"keyshard_partition_covered{{{labels}}} 1.0",
        ):
            assert line in text
        assert 'kind="spark"' in text
        assert httpx.get(f"{url}readyz", trust_env=False).status_code == 200
        assert httpx.get(f"{url}livez", trust_env=False).status_code == 200
    finally:
        host.reader.stop()
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False)


def test_a_query_serves_its_page_until_it_stops(caplog: pytest.LogCaptureFixture) -> None:
    topic = MemoryTopic()
    host = Host(topic, ui_port=0)
    host.reader.latestOffset(host.reader.initialOffset(), LIMIT)
    try:
        port = host.reader._runtime.monitor.page_port  # type: ignore[union-attr]
        assert f"the page is served on port {port}" in caplog.text
        (told,) = httpx.get(f"http://127.0.0.1:{port}/api/status", timeout=deadline(20)).json()[
            "sources"
        ]
        assert (told["kind"], told["subscription"]) == ("spark", "unit")
    finally:
        host.reader.stop()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/")


def test_a_query_is_found_by_its_name_until_it_stops() -> None:
    topic = MemoryTopic()
    host = Host(topic, name="invoices")
    host.reader.latestOffset(host.reader.initialOffset(), LIMIT)
    try:
        found = running_source("invoices")

        def hot_keys_known() -> bool:
            topic.cluster.publish(topic.topic, Message(b"row", key="hot"))
            return bool(found.ask("status")["hotKeys"])

        wait_until(hot_keys_known)
        assert (found.kind, found.subscription) == ("spark", "unit")
        status = found.ask("status")
        assert (status["kind"], status["name"], status["state"]) == ("spark", "invoices", "running")
        assert [(one["key"], one["share"]) for one in status["hotKeys"]] == [("hot", 1.0)]
        assert len(status["ranges"]) == 4
        assert len(status["partitions"]) == 2
    finally:
        host.reader.stop()
    assert running_sources() == []


def test_a_micro_batch_is_a_span_from_its_plan_to_its_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exported = Exported(monkeypatch)
    topic = MemoryTopic()
    host = Host(topic, telemetry=True)
    reader, start = host.reader, host.reader.initialOffset()
    reader.latestOffset(start, LIMIT)
    ends: list[str] = []
    for sent in (10, 20, 30):
        topic.cluster.publish(topic.topic, *(Message(b"row", key=f"k{n}") for n in range(10)))
        host.wait(sent)
        end = reader.latestOffset(start, LIMIT)
        reader.partitions(start, end)
        reader.partitions(start, end)
        assert len(exported.spans()) == len(ends)
        if sent < 30:
            reader.commit(end)
            reader.commit(end)
        ends.append(Checkpoint.from_dict(end).batch_id)
        start = end
    reader.stop()
    spans = exported.spans()
    told = [dict(present(span.attributes)) for span in spans]
    assert [one.pop("keyshard.batch.id") for one in told] == ends
    committed = {
        "messaging.system": "pulsar",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": topic.topic,
        "messaging.destination.subscription.name": "unit",
        "messaging.batch.message_count": 10,
    }
    assert {span.name for span in spans} == {f"process {topic.topic}"}
    assert told == [committed, committed, committed | {"error.type": "not_acknowledged"}]


def test_a_plan_that_fails_is_an_error_of_its_span(monkeypatch: pytest.MonkeyPatch) -> None:
    exported = Exported(monkeypatch)
    topic = MemoryTopic()
    host = Host(topic, telemetry=True)
    start = host.reader.initialOffset()
    host.reader.latestOffset(start, LIMIT)
    topic.cluster.publish(topic.topic, Message(b"row", key="k"))
    host.wait(1)
    end = host.reader.latestOffset(start, LIMIT)
    host.reader.partitions(start, end)
    host.reader.commit(end)
    with pytest.raises(BatchReleasedError):
        host.reader.partitions(start, end)
    host.reader.stop()
    assert [dict(present(span.attributes)).get("error.type") for span in exported.spans()] == [
        None, "keyshard.errors.BatchReleasedError",
    ]  # fmt: skip


class ReaderSetup(MemoryTopic):
    """A topic, and the stream processes on it."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[str] = []
        self.hosts: list[Host] = []

    def publish(self, count: int) -> None:
        for _ in range(count):
            self.sent.append(str(len(self.sent)))
            self.cluster.publish(
                self.topic, Message(self.sent[-1].encode(), key=f"k{len(self.sent) % 9}")
            )

    def host(self) -> Host:
        for host in self.hosts:
            host.reader.stop()
        self.hosts.append(Host(self))
        return self.hosts[-1]


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReaderSetup]:
    monkeypatch.setattr(stream_runtime, "end_with_host", lambda *_: None)
    setup = ReaderSetup()
    yield setup
    for host in setup.hosts:
        host.reader.stop()
    setup.cluster.validate()


def test_batches_in_the_order_of_a_new_query(setup: ReaderSetup) -> None:
    host = setup.host()
    setup.publish(60)
    start, got = host.reader.initialOffset(), []
    end = host.reader.latestOffset(start, LIMIT)
    while end == start:
        end = host.reader.latestOffset(start, LIMIT)
    assert host.reader.initialOffset() == start
    while end != start:
        got += host.values(start, end)
        start, end = end, host.reader.latestOffset(end, LIMIT)
        wait = len(got) < 60
        while wait and end == start:
            end = host.reader.latestOffset(start, LIMIT)
        if end != start:
            host.reader.commit(start)
    assert Counter(got) == Counter(setup.sent)
    wait_until(lambda: setup.backlog("unit") == 0)


def test_the_first_batch_runs_again_after_a_restart_exactly(setup: ReaderSetup) -> None:
    setup.publish(30)
    host = setup.host()
    initial = host.reader.initialOffset()
    host.reader.latestOffset(initial, LIMIT)
    host.wait(30)
    first = host.reader.latestOffset(initial, LIMIT)
    before = host.values(initial, first)
    host = setup.host()  # killed before the batch is committed
    again = host.reader.initialOffset()
    got = host.values(again, first)
    assert got == before
    start = first
    while len(got) < 30:
        end = host.reader.latestOffset(start, LIMIT)
        if end != start:
            host.reader.commit(start)
            got += host.values(start, end)
            start = end
    assert Counter(got) == Counter(setup.sent)
    assert host.reader.latestOffset(start, LIMIT) == start
    wait_until(lambda: setup.backlog("unit") == 0)


def test_a_checkpoint_of_another_subscription_is_refused_at_the_first_batch_too(
    setup: ReaderSetup,
) -> None:
    host = setup.host()
    initial = host.reader.initialOffset()
    state = {"batch": "1:0", "delivered": "1:0", "published": 1}
    partitions = {f"{setup.topic}-partition-0": state}
    with pytest.raises(CheckpointMismatchError):
        host.reader.partitions(
            initial, {**initial, "subscription": "other", "partitions": partitions}
        )


def test_planning_twice_as_a_union_does_is_no_async_progress(setup: ReaderSetup) -> None:
    setup.publish(10)
    host = setup.host()
    start = host.reader.initialOffset()
    host.reader.latestOffset(start, LIMIT)
    host.wait(10)
    end = host.reader.latestOffset(start, LIMIT)
    assert host.values(start, end) == host.values(start, end) != []


def test_async_progress_is_refused_with_nothing_acknowledged(setup: ReaderSetup) -> None:
    setup.publish(60)
    host = setup.host()
    start = host.reader.initialOffset()
    host.reader.latestOffset(start, LIMIT)
    host.wait(60)
    first = host.reader.latestOffset(start, LIMIT)
    host.reader.partitions(start, first)
    second = host.reader.latestOffset(first, LIMIT)
    assert second != first
    with pytest.raises(AsyncProgressError):
        host.reader.partitions(first, second)
    host.reader.stop()
    assert setup.backlog("unit") == 60


def test_a_commit_of_an_older_batch_does_not_allow_the_next(setup: ReaderSetup) -> None:
    setup.publish(60)
    host = setup.host()
    ends = [host.reader.initialOffset()]
    host.reader.latestOffset(ends[0], LIMIT)
    host.wait(60)
    for _ in range(2):
        ends.append(host.reader.latestOffset(ends[-1], LIMIT))
        host.reader.partitions(ends[-2], ends[-1])
        if len(ends) == 2:
            host.reader.commit(ends[1])
    ends.append(host.reader.latestOffset(ends[-1], LIMIT))
    host.reader.commit(ends[1])  # two batches late, as an interval of 0 ms makes it
    with pytest.raises(AsyncProgressError):
        host.reader.partitions(ends[-2], ends[-1])


def test_a_bounded_query_ends_and_stays_ended(setup: ReaderSetup) -> None:
    host = setup.host()
    setup.publish(50)
    host.reader.prepareForTriggerAvailableNow()
    start = host.reader.initialOffset()
    got: list[str] = []
    while (end := host.reader.latestOffset(start, LIMIT)) != start:
        if got:
            host.reader.commit(start)
        setup.publish(5)
        got += host.values(start, end)
        start = end
    assert len(got) == 50
    assert setup.backlog("unit") == len(setup.sent) - 50
    assert host.reader.latestOffset(start, LIMIT) == start
    output = host.reader.reportLatestOffset()
    assert output is not None
    assert output["malformedDropped"] == output["malformedNulls"] == 0


def test_the_end_of_a_query_logs_the_findings_of_its_last_batch(
    setup: ReaderSetup, caplog: pytest.LogCaptureFixture
) -> None:
    # Spark asks for progress before the tasks of a batch run, so a query of one batch shows none.
    host = setup.host()
    setup.publish(10)
    host.reader.prepareForTriggerAvailableNow()
    start = host.reader.initialOffset()
    end = host.reader.latestOffset(start, LIMIT)
    first, *_ = host.reader.partitions(start, end)
    assert present(host.reader.reportLatestOffset())["malformedNulls"] == 0
    report_malformed(first.ticket, 3)  # type: ignore[attr-defined]
    found = "Rows missing or incomplete since its start: malformedNulls 3."
    assert found not in caplog.text
    for _ in range(2):
        assert host.reader.latestOffset(end, LIMIT) == end
    host.reader.stop()
    assert caplog.text.count(found) == 1


def test_a_stopped_query_logs_the_findings_of_its_tasks(
    setup: ReaderSetup, caplog: pytest.LogCaptureFixture
) -> None:
    host = setup.host()
    setup.publish(10)
    start = host.reader.initialOffset()
    host.reader.latestOffset(start, LIMIT)
    host.wait(10)
    end = host.reader.latestOffset(start, LIMIT)
    first, *_ = host.reader.partitions(start, end)
    report_malformed(first.ticket, 2)  # type: ignore[attr-defined]
    host.reader.stop()
    assert caplog.text.count("since its start: malformedNulls 2.") == 1


def test_once_is_refused(setup: ReaderSetup) -> None:
    host = setup.host()
    with pytest.raises(UnsupportedTriggerError, match="availableNow"):
        host.reader.latestOffset(host.reader.initialOffset(), ReadAllAvailable())


def test_an_unexpected_error_while_a_batch_is_read_again_is_named(
    setup: ReaderSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark got the error as a thread of the pool raised it, without a code."""
    setup.publish(30)
    host = setup.host()
    initial = host.reader.initialOffset()
    host.reader.latestOffset(initial, LIMIT)
    host.wait(30)
    first = host.reader.latestOffset(initial, LIMIT)
    host.reader.partitions(initial, first)
    host = setup.host()

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("in a thread of the replay")

    with monkeypatch.context() as patched:
        patched.setattr("keyshard.reading.replay._replay_partition", broken)
        with pytest.raises(UnexpectedError, match=r"Reading a batch again.*ZeroDivisionError"):
            host.reader.partitions(initial, first)
    assert setup.backlog("unit") == 30, "nothing was acknowledged"
    assert len(host.values(initial, first)) > 0
