"""Numbers that are unknown, or that a run does not have, are not zero."""

from __future__ import annotations

import pytest
from rich.console import Console

from keyshard.cli.status_text import Rates, status_view
from keyshard.control import running_source
from keyshard.observe.status_types import Status
from tests.support.copied_topic import Copied
from tests.support.memory_topic import MemoryTopic, Run
from tests.support.statuses import metrics_of

pytestmark = pytest.mark.usefixtures("control_folder")

OF_HANDLERS = (
    "completed", "failedAttempts", "rejected", "parked", "deadLettered", "observerErrors",
)  # fmt: skip
OF_OUTPUTS = ("outputsPublished", "outputsConfirmed", "outputsFailed")


def text_of(status: Status) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(status_view(status, Rates(), all_ranges=None))
    return captured.get()


def test_a_stream_has_no_counts_of_handlers_and_outputs() -> None:
    orders = MemoryTopic()
    with orders.source().open():
        status: Status = running_source("keyshard").ask("status")
    assert status["counters"] == dict.fromkeys(OF_HANDLERS + OF_OUTPUTS)
    assert status["handlerSeconds"] is None
    metrics = metrics_of(status)
    for name in ("messages_completed_total", "outputs_published_total", "handler_seconds_sum"):
        assert f"keyshard_{name}{{" not in metrics
    assert "keyshard_messages_received_total{" in metrics
    text = text_of(status)
    assert "received 0 rows" in text
    assert "completed" not in text


def test_batches_with_a_sink_count_only_outputs(copied: Copied) -> None:
    source = copied.source()
    run = source.batches(50, 0.05, sink=copied.sink)
    copied.publish(keys=1, per_key=1)
    next(run)
    status = source.status()
    run.close()
    of_handlers, of_outputs = dict.fromkeys(OF_HANDLERS), dict.fromkeys(OF_OUTPUTS, 0)
    assert status["counters"] == of_handlers | of_outputs
    assert status["handlerSeconds"] is None
    metrics = metrics_of(status)
    assert "keyshard_messages_completed_total{" not in metrics
    assert "keyshard_outputs_published_total{" in metrics


def test_handlers_without_a_sink_count_no_outputs() -> None:
    orders = MemoryTopic()
    with Run(orders.source(), lambda _message: None, {}) as run:
        run.wait_started()
        status = run.source.status()
    of_handlers, of_outputs = dict.fromkeys(OF_HANDLERS, 0), dict.fromkeys(OF_OUTPUTS)
    assert status["counters"] == of_handlers | of_outputs
    metrics = metrics_of(status)
    assert 'keyshard_messages_completed_total{subscription="keyshard"} 0.0' in metrics
    assert "keyshard_outputs_published_total{" not in metrics
