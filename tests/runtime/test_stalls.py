"""The watchdog of a running source: stalled ranges and topic partitions."""

from __future__ import annotations

import logging
import threading
import time
from base64 import b64encode

import pytest

from keyshard import KeyShardSource
from keyshard.broker.memory import LookAhead
from keyshard.broker.memory import Message as Stored
from keyshard.broker.memory.dispatch import Subscription
from keyshard.control import running_source
from keyshard.core import partition_watchdog
from keyshard.core.range_watchdog import Stalled
from keyshard.core.ring.hash_range import range_index
from keyshard.core.ring.key_slot import key_slot
from keyshard.observe import broker_poll
from tests.helpers import present, wait_until
from tests.support.deadlines import deadline
from tests.support.watched_job import FAILING, KEYS, RANGES, Job

pytestmark = pytest.mark.usefixtures("control_folder")


def test_a_hung_handler_is_named_within_ten_seconds_and_others_continue(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job.start()
    began = time.monotonic()
    job.publish((KEYS[2], b"hang"), (KEYS[2], b"behind"), *((key, b"fine") for key in KEYS[:2]))
    with caplog.at_level(logging.WARNING):
        wait_until(lambda: job.range(2)["state"] == "stalled")
        wait_until(lambda: "range 2 is stalled" in caplog.text)
    assert time.monotonic() - began < deadline(10)
    message_id = str(job.hung[0].message_id)
    assert KEYS[2] in caplog.text
    assert message_id in caplog.text
    shown = job.range(2)
    blocking = present(shown["blockedBy"])
    assert (blocking["key"], blocking["messageId"]) == (KEYS[2], message_id)
    assert blocking["attempts"] == 0
    assert "has not returned" in present(shown["stalled"])["reason"]
    assert (shown["waiting"], shown["inFlight"]) == (1, 1)
    assert present(shown["oldestUnacknowledgedMillis"]) > 5_000
    assert [each["state"] for each in job.status()["ranges"]] == [
        "idle", "idle", "stalled", "idle",
    ]  # fmt: skip
    assert caplog.text.count("is stalled") == 1
    job.release.set()
    wait_until(lambda: job.range(2)["state"] == "idle")
    assert job.range(2)["stalled"] is None
    assert len(job.handled) == 4


@pytest.mark.simulated
def test_a_healthy_backlog_is_running_and_blocked_by_nothing(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.source = KeyShardSource(
        job.topic, subscription="jobs", parallelism=RANGES, service_url=job.url, admin_url=job.url,
        starting_position="earliest", window_rows_max=2_000,
    )  # fmt: skip
    done = threading.Event()

    monkeypatch.setattr(job, "handle", lambda _message: done.wait(0.005))
    job.publish(*((key, b"%d" % n) for n in range(1_500) for key in KEYS))
    job.start(lanes=1)
    looks = []
    while present(job.status()["counters"]["completed"]) < 1_000:
        looks += job.status()["ranges"]
        time.sleep(0.01)
    done.set()
    assert {each["state"] for each in looks if each["waiting"]} == {"running"}
    assert [each["blockedBy"] for each in looks if each["blockedBy"]] == []


def test_a_key_that_waits_for_its_retry_blocks_its_range_and_is_explained(
    job: Job, quick_watchdog: None, caplog: pytest.LogCaptureFixture
) -> None:
    job.start(retry=FAILING)
    job.publish((KEYS[1], b"fail"), (KEYS[1], b"behind"), (KEYS[0], b"fine"))
    wait_until(lambda: job.range(1)["blockedBy"] and job.range(1)["stalled"])
    blocking = present(job.range(1)["blockedBy"])
    assert "retry in" in blocking["reason"]
    assert "ValueError: not now" in blocking["reason"]
    assert blocking["attempts"] == 1
    output = running_source("jobs").ask("explain", key=KEYS[1])
    assert output["lane"]["state"] == "retrying"
    assert output["lane"]["messageId"] == blocking["messageId"]
    assert (output["range"], output["waiting"], output["parked"]) == (1, 2, False)
    assert output["slot"] == key_slot(KEYS[1])
    assert output["hashRange"] == "16384-32767"
    as_bytes = running_source("jobs").ask("explain", key=b64encode(b"k").decode())["ifBytes"]
    assert as_bytes["slot"] == key_slot(b"k")
    assert as_bytes["hashRange"]
    other = running_source("jobs").ask("explain", key="never seen")
    assert other["range"] == range_index(key_slot("never seen"), RANGES)
    assert other["lane"]["state"] == "empty"


@pytest.mark.simulated
def test_a_consumer_that_is_away_is_named_and_leaves_a_gap(job: Job, quick_watchdog: None) -> None:
    job.start()
    away = job.cluster.partitions(job.topic)[0]
    (client,) = job.cluster._clients
    consumers = client.drop([away])
    wait_until(lambda: all(each["stalled"] for each in job.status()["ranges"]))
    status = job.status()
    assert f"not connected to {away}" in present(status["ranges"][0]["stalled"])["reason"]
    first, second = status["partitions"]
    assert (first["covered"], first["gaps"]) == (False, ["0-65535"])
    assert (second["covered"], second["gaps"]) == (True, [])
    client.reconnect(consumers)
    wait_until(lambda: all(each["state"] == "idle" for each in job.status()["ranges"]))
    assert all(each["covered"] for each in job.status()["partitions"])


def test_a_stalled_topic_partition_is_named_while_its_ranges_are_busy_with_others(
    job: Job,
    quick_watchdog: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(partition_watchdog, "UNDELIVERED_S", 0.3)
    job.start()
    stuck, other = job.cluster.partitions(job.topic)
    withheld, dispatch = job.cluster.subscription(stuck, "jobs"), Subscription.dispatch
    monkeypatch.setattr(
        Subscription, "dispatch", lambda one: None if one is withheld else dispatch(one)
    )
    job.cluster.publish(stuck, Stored(b"late", key=KEYS[0]))

    def stalled() -> Stalled | None:
        job.cluster.publish(other, *(Stored(b"fine", key=key) for key in KEYS))
        first, second = job.status()["partitions"]
        assert second["stalled"] is None
        return first["stalled"]

    wait_until(stalled)
    assert present(stalled())["kind"] == "undelivered"
    assert len(job.handled) >= len(KEYS)
    wait_until(lambda: "is stalled" in caplog.text)
    (named,) = [text for text in caplog.messages if "is stalled" in text]
    assert named == (
        f"{stuck} is stalled: the broker delivers none of 1 entries, though every range asks for "
        "messages (docs/runbook.md#keyshardstalledundelivered)"
    )
    assert {each["state"] for each in job.status()["ranges"]} <= {"idle", "running"}
    monkeypatch.undo()
    job.cluster.publish(stuck, Stored(b"later", key=KEYS[0]))
    wait_until(lambda: job.status()["partitions"][0]["stalled"] is None)


@pytest.mark.simulated
def test_a_topic_partition_does_not_stall_while_its_window_is_full(
    job: Job, quick_watchdog: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker is at its look-ahead limit because the source pauses, and not the reverse."""
    monkeypatch.setattr(broker_poll, "REST_TIMES", 0.0)
    job.cluster.look_ahead = LookAhead(per_consumer=10, per_subscription=20)
    job.source = KeyShardSource(
        job.topic, subscription="jobs", parallelism=RANGES, service_url=job.url, admin_url=job.url,
        starting_position="earliest", window_rows_max=40, receiver_queue_size=5,
    )  # fmt: skip
    job.start()
    full = job.cluster.partitions(job.topic)[0]
    job.cluster.publish(full, *[Stored(b"hang", key=KEYS[0])] * 100)

    def waited() -> bool:
        status = job.status()
        first, hung = status["partitions"][0], status["ranges"][0]["stalled"]
        assert first["stalled"] is None
        return first["replay"] == 20 and hung is not None and hung["forSeconds"] > 1

    wait_until(waited)
