"""Numbers that are unknown, or that a run does not have, are not zero."""

from __future__ import annotations

import re

import pytest
from rich.console import Console

from keyshard.broker.memory import MemoryBroker, Message
from keyshard.broker.memory.admin import MemoryAdmin
from keyshard.cli.status_text import Rates, status_view
from keyshard.config.sink import SinkConfig
from keyshard.consumers.intake import LoadSample
from keyshard.control import running_source
from keyshard.core.diagnosis import Level
from keyshard.errors import AuthorizationError, BrokerUnavailableError
from keyshard.observe.doctor import Expected, _limits, examine, examine_sink
from keyshard.observe.status_types import Status
from keyshard.publishing.preflight import check_deduplication
from tests.helpers import config, received, running, wait_until
from tests.support.copied_topic import Copied
from tests.support.faulty_broker import Fault, ScriptedCall, answering, faulty
from tests.support.memory_topic import MemoryTopic, Run
from tests.support.parking_topic import ParkingTopic
from tests.support.statuses import metrics_of, progress, status

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
    assert status["circuit"] is None
    metrics = metrics_of(status)
    for name in (
        "messages_completed_total", "outputs_published_total", "handler_seconds_sum",
        "circuit_open", "circuit_openings_total",
    ):  # fmt: skip
        assert f"keyshard_{name}{{" not in metrics
    assert "keyshard_messages_received_total{" in metrics
    text = text_of(status)
    assert "received 0 rows" in text
    assert "completed" not in text


def test_segments_that_wait_are_text_only_while_some_do() -> None:
    assert "segments" not in text_of(status(window=progress()))
    waiting = {**progress(), "segmentsWaiting": 2}
    assert "segments that wait for their parents: 2" in text_of(status(window=waiting))


def test_batches_with_a_sink_count_only_outputs(copied: Copied) -> None:
    source = copied.source()
    run = source.batches(50, 0.05, sink=copied.sink)
    copied.publish(keys=1, per_key=1)
    next(run)
    status = source.status()
    run.close()
    of_handlers, of_outputs = dict.fromkeys(OF_HANDLERS), dict.fromkeys(OF_OUTPUTS, 0)
    assert status["counters"] == of_handlers | of_outputs
    assert (status["handlerSeconds"], status["circuit"]) == (None, None)
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
    assert 'keyshard_circuit_open{subscription="keyshard"} 0.0' in metrics
    assert "keyshard_outputs_published_total{" not in metrics


@pytest.mark.parametrize(("asks", "lost"), [(True, 0), (False, None)])
def test_losses_are_unknown_unless_the_cursor_is_read(asks: bool, lost: int | None) -> None:
    orders = MemoryTopic()
    admin = MemoryAdmin(orders.cluster) if asks else None
    with running(orders.cluster, config(orders.topic), admin=admin) as coordinator:
        progress = coordinator.status()
    assert (progress["entriesLost"], progress["entriesNotDue"]) == (lost, 0)


def test_lost_entries_of_a_planned_batch_count_without_the_admin_interface() -> None:
    orders = MemoryTopic(0)
    orders.cluster.publish(orders.topic, *(Message(b"1", key=f"k{n}") for n in range(20)))
    (where,) = orders.where
    with running(orders.cluster, config(orders.topic)) as first:
        received(first, 20)
        planned = first.batches.cut()
    assert planned is not None
    last = planned.partitions[where].batch.last
    assert last is not None
    orders.cluster.trim(where, before=last)
    source = config(orders.topic, fail_on_data_loss=False)
    with running(orders.cluster, source, planned, planned=True) as second:
        second.batches.plan(planned)
        assert second.status()["entriesLost"] == len(planned.partitions[where].batch) - 1


@pytest.mark.parametrize(
    ("asks", "bounded", "not_due"), [(True, True, 0), (False, False, 0), (False, True, None)]
)
def test_a_bounded_run_of_pulsar_client_sees_no_delays_without_the_admin_interface(
    asks: bool, bounded: bool, not_due: int | None
) -> None:
    orders = MemoryTopic()
    admin = MemoryAdmin(orders.cluster) if asks else None
    source = config(orders.topic, transport="client")
    with running(orders.cluster, source, admin=admin, available_now=bounded) as coordinator:
        assert coordinator.status()["entriesNotDue"] == not_due


@pytest.mark.parametrize("assumed", [True, False])
@pytest.mark.simulated
def test_limits_of_a_broker_that_refuses_its_configuration_are_named_as_assumed(
    assumed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if assumed:
        monkeypatch.setattr(MemoryAdmin, "settings", lambda _: None)
    orders = MemoryTopic()
    with Run(orders.source(admin_url=orders.url), lambda _message: None, {}) as run:
        run.wait_started()
        wait_until(lambda: run.source.status()["partitions"][0]["ackGapsMax"])
        status = run.source.status()
    (each, _) = status["partitions"]
    assert each["limitsAssumed"] == assumed
    assert ("(assumed)" in text_of(status)) == assumed
    connect = lambda: MemoryBroker(orders.cluster)  # noqa: E731
    findings = examine(config(orders.topic), connect, MemoryAdmin(orders.cluster))
    told = [one.text for one in findings if one.about == "broker limits"]
    assert len(told) == assumed
    assert all(text.startswith("unknown: the role may not read") for text in told)


def test_hot_keys_are_unknown_if_workers_keep_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoadSample, "hot_keys", lambda *_: None)
    orders = MemoryTopic()
    with orders.source().open():
        status: Status = running_source("keyshard").ask("status")
    assert status["hotKeys"] is None
    assert "hot keys" not in text_of(status)


@pytest.mark.parametrize("per_topic", [None, 0])
def test_the_doctor_tells_an_unknown_limit_of_consumers_from_none(
    per_topic: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = MemoryTopic()
    monkeypatch.setattr(MemoryAdmin, "consumer_limits", lambda *_: (per_topic, 0))
    connect, admin = (lambda: MemoryBroker(orders.cluster)), MemoryAdmin(orders.cluster)
    found = [
        one.text
        for one in examine(config(orders.topic), connect, admin)
        if one.about == "consumer limits"
    ]
    told = "unknown: the role may not read the configuration of the broker. Whether consumers "
    told += "exceed maxConsumersPerTopic is not checked."
    assert found == [told] * (per_topic is None)


@pytest.mark.parametrize(
    ("refused", "known", "consumers", "unknown"),
    [
        ("unacknowledged_limits", 50_000, (1, 0), "For unacknowledged messages"),
        ("consumer_limits", 7, (None, None), "Whether consumers exceed"),
    ],
)
def test_the_doctor_keeps_the_limits_that_the_role_may_read(
    refused: str, known: int, consumers: tuple[int | None, int | None], unknown: str
) -> None:
    """Issue: two requests shared one ``except``, so a refusal lost the answer to the other."""
    orders = MemoryTopic()
    admin = faulty(
        MemoryAdmin(orders.cluster), unacknowledged_limits=answering((7, 0)),
        consumer_limits=answering((1, 0)),
    )  # fmt: skip
    refusal = ScriptedCall(raises=AuthorizationError("The role lacks a permission."))
    limits, of_consumers, (finding,) = _limits(
        faulty(admin, **{refused: refusal}), orders.topic, "4.0.8"
    )
    assert limits.unacked_per_consumer == known
    assert of_consumers == consumers
    assert (finding.about, finding.level) == ("topic limits", Level.WARNING)
    assert unknown in finding.text


def test_the_doctor_goes_on_after_policies_that_the_role_may_not_read() -> None:
    orders = MemoryTopic()
    refusal = AuthorizationError("The role lacks a permission.")
    for name in ("unacknowledged_limits", "consumer_limits"):
        admin = faulty(MemoryAdmin(orders.cluster), **{name: ScriptedCall(refusal)})
        findings = {
            one.about: one.text
            for one in examine(config(orders.topic), lambda: MemoryBroker(orders.cluster), admin)
        }
        assert findings["topic limits"].startswith("unknown: the role may not read the policies")
        assert "batching" in findings, "later checks are made"


def test_the_size_of_messages_of_an_empty_topic_is_unknown_to_the_doctor() -> None:
    orders = MemoryTopic()
    connect, admin = (lambda: MemoryBroker(orders.cluster)), MemoryAdmin(orders.cluster)
    told = {
        load.message_bytes: [
            one.text
            for one in examine(config(orders.topic), connect, admin, load)
            if one.about == "message size"
        ]
        for load in (Expected(1_000), Expected(1_000, 100))
    }
    assert told[None][0].startswith("unknown: no message was sampled")
    assert told[100] == []


@pytest.mark.parametrize("refused", [True, False])
def test_deduplication_that_the_role_may_not_see_refuses_no_sink(
    refused: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    orders = MemoryTopic()

    def asked(*_: object) -> None:
        if refused:
            raise AuthorizationError("The role lacks a permission.")

    monkeypatch.setattr(MemoryAdmin, "deduplicates", asked)
    sink = SinkConfig(orders.topic, sink_id="s", service_url=orders.url)
    check_deduplication(sink, [orders.topic])
    assert "is not known before the first entry is confirmed" in caplog.text
    connect, admin = (lambda: MemoryBroker(orders.cluster)), MemoryAdmin(orders.cluster)
    found = {one.about: one for one in examine_sink(orders.topic, connect, admin)}
    assert found["deduplication"].level is Level.WARNING
    assert found["deduplication"].text.startswith("unknown: the role may not read")


REFUSED = AuthorizationError("The role lacks a permission.")
AWAY = BrokerUnavailableError("The admin interface does not answer.")


@pytest.mark.parametrize(
    ("enabled", "by_topic", "told"),
    [
        (True, REFUSED, [(Level.WARNING, "a policy of .* itself .* The broker deduplicates")]),
        (False, REFUSED, [(Level.PROBLEM, "is disabled")]),
        (REFUSED, True, [(Level.WARNING, "A policy of .* itself enables")]),
        (REFUSED, False, [(Level.WARNING, "unknown: .* whether the broker deduplicates")]),
        (True, AWAY, [(Level.OK, "The broker deduplicates"), (Level.PROBLEM, "not answer")]),
        (AWAY, True, [(Level.WARNING, "A policy of .* enables"), (Level.PROBLEM, "not answer")]),
        (AWAY, False, [(Level.PROBLEM, "not answer")]),
    ],
)
def test_the_doctor_keeps_each_answer_about_deduplication(
    enabled: bool | Exception, by_topic: bool | Exception, told: list[tuple[Level, str]]
) -> None:
    """Issue: two requests shared one ``except``, so a refusal lost the answer to the other."""

    def fault(answer: bool | Exception) -> Fault:
        return ScriptedCall(raises=answer) if isinstance(answer, Exception) else answering(answer)

    orders = MemoryTopic()
    admin = faulty(
        MemoryAdmin(orders.cluster), deduplicates=fault(enabled),
        deduplicates_by_topic=fault(by_topic),
    )  # fmt: skip
    found = [
        one
        for one in examine_sink(orders.topic, lambda: MemoryBroker(orders.cluster), admin)
        if one.about == "deduplication"
    ]
    assert [one.level for one in found] == [level for level, _ in told]
    for one, (_, text) in zip(found, told, strict=True):
        assert re.search(text, one.text)


def test_the_backlog_of_an_old_round_is_forgotten() -> None:
    orders = MemoryTopic()
    orders.cluster.publish(orders.topic, Message(b"1", key="k"))
    admin = faulty(MemoryAdmin(orders.cluster), subscription=(fails := ScriptedCall()))
    with running(orders.cluster, config(orders.topic), admin=admin) as coordinator:
        coordinator.discovery.round()
        assert coordinator.status()["backlogEntries"] == 1
        fails.raises = BrokerUnavailableError("away")
        with pytest.raises(BrokerUnavailableError):
            coordinator.discovery.round()
        assert coordinator.status()["backlogEntries"] is None
        fails.raises = None
        coordinator.discovery.round()
        assert coordinator.status()["backlogEntries"] == 1


def test_content_that_is_too_large_for_a_dead_letter_has_an_unknown_length(
    parking: ParkingTopic,
) -> None:
    parking.cluster.publish(parking.topic, Message(b"0" * 100_000, key="large"))
    parking.cluster.publish(parking.topic, Message(b"", key="empty"))
    parking.cluster.message_bytes_max = 70_000

    def fail(_message: object) -> None:
        raise ValueError("no")

    with parking.run(fail) as run:
        wait_until(lambda: run.source.status()["parkedKeys"] == 2)
        explained = running_source("keyshard").ask
        shown = {
            key: explained("explain", key=key)["parkedBy"]["message"] for key in ("large", "empty")
        }
    lengths = {key: (one["value"], one["valueBytes"]) for key, one in shown.items()}
    assert lengths == {"large": (None, None), "empty": ("", 0)}


@pytest.mark.simulated
def test_a_topic_partition_says_why_the_numbers_of_the_broker_are_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    orders = MemoryTopic()
    with Run(orders.source(), lambda _message: None, {}) as run:
        run.wait_started()
        assert {one["unknown"] for one in run.source.status()["partitions"]} == {"no admin_url"}
    with Run(orders.source(admin_url=orders.url), lambda _message: None, {}) as run:
        run.wait_started()
        wait_until(lambda: {one["unknown"] for one in run.source.status()["partitions"]} == {""})
    refused = ScriptedCall(raises=AuthorizationError("The role may not ask."))
    monkeypatch.setattr(MemoryAdmin, "version", lambda _: refused(str))
    with Run(orders.source(admin_url=orders.url), lambda _message: None, {}) as run:
        wait_until(lambda: run.error or run._runs())
        wait_until(
            lambda: all(
                "may not ask" in one["unknown"] for one in run.source.status()["partitions"]
            )
        )
