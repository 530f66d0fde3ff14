"""The status of a running source: counts, facts of the broker, lag, and recent history."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from keyshard import KeyShardSource
from keyshard.broker.connect import connect_admin
from keyshard.broker.memory import MemoryCluster
from keyshard.broker.memory.admin import MemoryAdmin
from keyshard.broker.port import StartPosition
from keyshard.cli import main
from keyshard.config.connection import Connection
from keyshard.control import running_source, running_sources
from keyshard.coordinator.progress import Progress
from keyshard.core import range_watchdog, rates
from keyshard.core.position.entry import TopicPartition
from keyshard.core.recent_history import CommitsStatus
from keyshard.core.rescale_history import (
    DrainedMessage,
    RescaleStatus,
    RescaleSummary,
    RunningRescaleStatus,
)
from keyshard.core.ring.hash_range import range_index, split_ring
from keyshard.core.ring.key_slot import possible_slots
from keyshard.errors import BrokerError, DrainTimeoutError
from keyshard.observe import broker_poll, monitor
from keyshard.observe.broker_poll import BrokerPoll
from keyshard.observe.status_types import (
    NewestErrorStatus,
    PartitionStatus,
    RangeStatus,
    Shares,
    Status,
)
from tests.helpers import present, wait_until
from tests.support.deadlines import deadline
from tests.support.faulty_broker import ScriptedCall, faulty
from tests.support.watched_job import FAILING, KEYS, RANGES, Job

pytestmark = pytest.mark.usefixtures("control_folder")

NEWEST = get_type_hints(NewestErrorStatus)
HISTORY = [
    *chain.from_iterable(
        get_type_hints(one)
        for one in (
            CommitsStatus,
            RescaleStatus,
            RunningRescaleStatus,
            DrainedMessage,
            RescaleSummary,
        )
    )
]


def test_status_is_plain_json_with_counts_and_facts_of_the_broker(
    job: Job, quick_watchdog: None
) -> None:
    job.start(lanes=3, workers=2)
    job.publish((KEYS[0], b"hang"), *((key, b"%d" % n) for n in range(5) for key in KEYS[1:]))
    wait_until(lambda: len(job.handled) == 15)
    wait_until(lambda: sum(each["backlog"] or 0 for each in job.status()["partitions"]) == 1)
    status = json.loads(json.dumps(job.status()))
    assert (status["subscription"], status["topics"]) == ("jobs", [job.topic])
    assert (status["lanes"], status["workers"], status["executor"]) == (3, 2, "threads")
    assert [each["hashRanges"] for each in status["ranges"]] == [
        [str(hash_range)] for hash_range in split_ring(RANGES)
    ]
    assert status["counters"]["completed"] == 15
    assert present(status["handlerSeconds"])["count"] == 15
    for each in status["partitions"]:
        # The limits are those of Pulsar 5.0.
        assert each["replayMax"] == RANGES * 4_000
        assert each["ackGapsMax"] == 200_000
        assert each["replay"] == 0
    assert status["brokerError"] == ""
    assert status["parked"] == []


def test_a_topic_partition_without_an_answer_of_the_broker_hides_no_other(
    job: Job, quick_watchdog: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, silent = MemoryAdmin.subscription, {0}

    def subscription(
        admin: MemoryAdmin, where: TopicPartition, name: str, *, oldest: bool
    ) -> Mapping[str, Any] | None:
        if where.partition in silent:
            raise BrokerError(f"{where.name} has no answer")
        return ask(admin, where, name, oldest=oldest)

    job.start()
    wait_until(lambda: all(each["backlog"] == 0 for each in job.status()["partitions"]))
    monkeypatch.setattr(MemoryAdmin, "subscription", subscription)
    wait_until(lambda: job.status()["brokerError"].endswith("orders-partition-0 has no answer"))
    job.publish(*((f"key-{number}", b"hang") for number in range(20)))
    wait_until(lambda: job.status()["partitions"][1]["backlog"])
    assert job.status()["partitions"][0]["backlog"] == 0, "as it was before"
    job.source._active()._monitor.view._broker_facts.known = {}  # type: ignore[union-attr]
    wait_until(lambda: job.status()["partitions"][1]["backlog"])
    assert job.status()["partitions"][0]["backlog"] is None
    assert (job.status()["lag"]["entries"], job.status()["lag"]["rows"]) == (None, None)
    silent.clear()
    wait_until(lambda: job.status()["partitions"][0]["backlog"])
    wait_until(lambda: job.status()["brokerError"] == "")


def test_topic_partitions_that_never_answer_hide_no_others_and_old_facts_are_forgotten(
    quick_watchdog: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = MemoryCluster()
    wheres = cluster.partitions(cluster.create_topic("t", 12))
    for where in wheres:
        cluster.open_subscription(where, "jobs", StartPosition.EARLIEST)
    silent = set(wheres[:5])

    error = BrokerError("no answer")
    admin = faulty(
        MemoryAdmin(cluster),
        version=ScriptedCall(raises=lambda: error if len(silent) == len(wheres) else None),
        subscription=ScriptedCall(raises=lambda where, _: error if where in silent else None),
    )
    facts = BrokerPoll(lambda: admin, "jobs", lambda: dict.fromkeys(wheres, True), lambda: ())
    try:
        wait_until(lambda: facts.known.keys() == set(wheres[5:]))
        monkeypatch.setattr(broker_poll, "KEPT_S", 0.1)
        monkeypatch.setattr(broker_poll, "LIMITS_S", 0.0)
        silent.update(wheres)
        wait_until(lambda: not facts.known)
        silent.clear()
        wait_until(lambda: facts.known.keys() == set(wheres))
    finally:
        facts.close()


def test_every_field_is_documented(job: Job) -> None:
    job.start()
    status = job.status()
    output = (Path(__file__).parents[2] / "docs" / "status.md").read_text()
    window = present(status["window"])
    assert set(window) == set(get_type_hints(Progress))
    progress = (Path(__file__).parents[2] / "docs" / "options.md").read_text()
    for name in window:
        assert f"`{name}`" in progress.partition("## Progress")[2], name
    range_, partition = status["ranges"][0], status["partitions"][0]
    seconds = present(status["handlerSeconds"])
    nested = (status["counters"], seconds, status["lag"], status["rates"])
    shares = get_type_hints(Shares)
    history = [*present(status["history"]), *HISTORY]
    for name in [*status, *chain(*nested), *range_, *partition, *shares, *NEWEST, *history]:
        assert f"`{name}`" in output, name
    for state in range_watchdog.RangeState:
        assert f"| `{state.value}` |" in output, state


def test_a_paused_source_shows_how_long_its_messages_have_waited(
    job: Job, quick_watchdog: None
) -> None:
    job.start()
    job.source.pause()
    published = 0

    def waits() -> bool:
        """A receive that has begun may take the first messages."""
        nonlocal published
        published += 1
        job.publish((KEYS[0], b"late"))
        return (job.status()["lag"]["seconds"] or 0) > 0.1

    wait_until(waits)
    assert len(job.handled) < published
    job.source.resume()
    wait_until(lambda: job.status()["lag"]["seconds"] == 0)
    assert len(job.handled) == published


def test_a_lag_is_unknown_without_an_admin_interface(job: Job) -> None:
    """Issue: an idle source showed a lag of 0 s, although the broker may hold messages."""
    job.start()
    job.source._active()._monitor.view._broker_facts = None  # type: ignore[union-attr]
    assert set(job.status()["lag"].values()) == {None}
    job.publish((KEYS[1], b"hang"))
    wait_until(lambda: (job.status()["lag"]["seconds"] or 0) > 0)


def test_the_age_of_a_backlog_is_also_shown_as_the_broker_measured_it(
    job: Job, quick_watchdog: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ages = {0: 90, 1: -1}
    subscription = MemoryAdmin.subscription

    def measured(admin: MemoryAdmin, where: TopicPartition, *args: Any, **kwargs: Any) -> Any:
        stats = subscription(admin, where, *args, **kwargs)
        return stats and {**stats, "oldestBacklogMessageAgeSeconds": ages[where.partition]}

    monkeypatch.setattr(MemoryAdmin, "subscription", measured)
    job.start()

    def shown() -> list[float | None]:
        status = job.status()
        lags = [status["lag"], *(one["lag"] for one in status["partitions"])]
        return [one["brokerSeconds"] for one in lags]

    wait_until(lambda: shown() == [90, 90, None])
    ages[0] = 0
    wait_until(lambda: shown() == [None, 0, None])


def test_lag_rates_and_the_newest_error_are_shown(
    job: Job, quick_watchdog: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rates, "JUDGED_FROM_S", 0.1)
    monkeypatch.setattr(rates, "SAMPLES_MAX", 10_000)  # the watchdog looks often here
    job.start(retry=FAILING)
    empty = {"entries": 0, "rows": 0, "seconds": 0.0}
    wait_until(lambda: empty.items() <= job.status()["lag"].items())
    wait_until(lambda: job.status()["rates"]["received"] is not None)  # two samples
    job.publish((KEYS[1], b"fail"), (KEYS[2], b"hang"))
    job.publish(*((KEYS[1], b"%d" % number) for number in range(20)))
    wait_until(lambda: (job.status()["rates"]["received"] or 0) > 0)
    wait_until(lambda: job.status()["lag"]["rows"] == 22)
    wait_until(lambda: (job.status()["lag"]["seconds"] or 0) > 0)
    wait_until(lambda: job.status()["lag"]["trend"] is not None)
    status = job.status()
    assert (status["version"], status["kind"], status["name"]) == (1, "handlers", "jobs")
    assert status["uptimeSeconds"] > 0
    assert status["lag"]["entries"] == sum(each["backlog"] or 0 for each in status["partitions"])
    assert sum(each["lag"]["rows"] or 0 for each in status["partitions"]) == 22
    newest = present(status["newestError"])
    assert newest["error"] == "ValueError: not now"
    assert present(newest["secondsAgo"]) < 60
    assert "retry in" in status["ranges"][1]["reason"]
    wait_until(lambda: present(job.range(1)["shares"])["heldBack"] > 0)
    wait_until(lambda: present(job.range(2)["shares"])["busy"] > 0)
    assert present(job.range(0)["shares"])["waiting"] == 1


def test_without_admin_url_the_broker_is_not_asked(job: Job) -> None:
    job.source = KeyShardSource(
        job.topic, subscription="jobs", service_url=job.url, starting_position="earliest"
    )
    job.start()
    (first, _) = job.status()["partitions"]
    assert first["covered"]
    assert {first[name] for name in ("backlog", "ackGaps", "replay", "replayMax")} == {None}


def test_an_admin_interface_that_is_away_holds_nothing_up(
    job: Job, quick_watchdog: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()

    def hang() -> Any:
        asked.set()
        assert job.release.wait(deadline(60))
        return connect_admin(Connection(job.url))

    job.start()
    monkeypatch.setattr(monitor, "connect_admin", lambda _url: hang())
    job.stop()
    job.release.clear()
    job.start()
    assert asked.wait(deadline(20))
    began = time.monotonic()
    assert job.status()["partitions"][0]["backlog"] is None
    assert time.monotonic() - began < deadline(30), "it hangs for 60 s"


def test_hot_keys_are_named(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.start()
    hot = "order\x1b[2J" + "x" * 2_000
    job.publish(*((hot, b"fine") for _ in range(70)), *((f"k{n}", b"fine") for n in range(30)))
    wait_until(lambda: len(job.handled) == 100)
    first, *others = present(job.status()["hotKeys"])
    assert first["key"] == f"{hot[:1_000]}..."
    assert (first["share"], len(others)) == (0.7, 4)
    assert first["ranges"] == sorted({explained(hot, name) for name in ("text", "bytes")})
    assert all(one["share"] == 0.01 for one in others)


def test_messages_that_come_during_the_start_count_as_all_others(job: Job) -> None:
    keys = [f"k{number}" for number in range(5)]
    job.publish(*((key, b"fine") for _ in range(10) for key in keys))
    job.start()
    wait_until(lambda: len(job.handled) == 50)
    hot = {one["key"]: one["share"] for one in present(job.status()["hotKeys"])}
    assert hot == dict.fromkeys(keys, 0.2)


def test_hot_keys_are_printed_without_control_characters(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.start()
    job.publish(*(("order\x1b[2J", b"fine") for _ in range(70)))
    wait_until(lambda: len(job.handled) == 70)
    with pytest.raises(SystemExit):
        main(["status", "jobs"])
    output = capsys.readouterr().out
    assert "hot keys: 'order" in output
    assert "\x1b" not in output


def explained(key: str, form: str) -> int:
    slots = possible_slots(key)
    return range_index(slots[-1] if form == "bytes" else slots[0], RANGES)


def test_commits_and_rescales_are_remembered(job: Job, tmp_path: Path) -> None:
    job.start(checkpoint=tmp_path / "jobs.json", drain_timeout_s=0.1)
    job.publish(*((key, b"fine") for key in KEYS))

    def entries() -> int:
        return sum(each["entries"] for each in present(job.status()["history"])["commits"])

    wait_until(lambda: entries() == len(KEYS))
    commits = present(job.status()["history"])["commits"]
    assert (commits[-1]["checkpointBytes"] or 0) > 0
    assert 0 <= commits[-1]["secondsAgo"] <= 60
    assert 1 <= sum(each["commits"] for each in commits) <= len(KEYS)
    job.source.rescale(8)
    job.publish((KEYS[0], b"hang"))
    wait_until(lambda: job.hung)
    with pytest.raises(DrainTimeoutError):
        job.source.rescale(3)
    job.source.rescale(8)
    history = present(job.status()["history"])
    moved, failed, unchanged = history["rescales"]
    assert (moved["epoch"], moved["before"], moved["after"]) == (1, 4, 8)
    assert (moved["movedFraction"], moved["error"]) == (0.5, "")
    assert 0 < present(moved["pauseMillis"]) <= moved["durationMillis"]
    assert (failed["epoch"], failed["before"], failed["after"]) == (1, 8, 3)
    assert (failed["movedFraction"], failed["pauseMillis"]) == (0, None)
    assert "handler" in failed["error"]
    assert (moved["asked"], moved["end"]) == ({"ranges": 8}, "moved")
    phases = [one["phase"] for one in moved["phases"]]
    assert phases == ["check", "drain", "close", "subscribe", "adopt"]
    assert sum(one["millis"] for one in moved["phases"]) <= moved["durationMillis"] + 0.01
    assert (failed["asked"], failed["end"]) == ({"ranges": 3}, "kept")
    assert [one["phase"] for one in failed["phases"]] == ["check", "drain"]
    assert failed["phases"][-1]["millis"] >= 100, "the drain took its whole timeout"
    assert (unchanged["end"], unchanged["phases"]) == ("unchanged", [])
    assert history["rescaling"] is None
    summary = history["rescaleSummary"]
    assert (summary["moved"], summary["kept"], summary["unchanged"]) == (1, 1, 1)
    assert summary["maxMillis"] == moved["durationMillis"]
    assert summary["drainTimeoutSeconds"] == 0.1


def test_a_rescale_that_drains_shows_the_message_that_it_waits_for(job: Job) -> None:
    job.start(drain_timeout_s=60)
    job.publish((KEYS[3], b"hang"))
    wait_until(lambda: job.hung)
    rescale = threading.Thread(target=job.source.rescale, args=(3,))
    rescale.start()

    def rescaling() -> RunningRescaleStatus | None:
        return present(job.status()["history"])["rescaling"]

    wait_until(lambda: (running := rescaling()) is not None and running["waitsFor"] is not None)
    running = present(rescaling())
    assert (running["asked"], running["before"], running["after"]) == ({"ranges": 3}, 4, 3)
    assert [one["phase"] for one in running["phases"]] == ["check", "drain"]
    assert present(running["waitsFor"])["key"] == KEYS[3]
    assert running["drainTimeoutSeconds"] == 60
    job.release.set()
    rescale.join(deadline(60))
    assert rescaling() is None


def test_batches_are_shown_too(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    batches = job.source.batches(max_rows=10, max_wait_s=0.01)
    job.publish(*((key, b"fine") for key in KEYS))
    batch = next(batches)
    # The batch holds the messages of the first 10 ms: others may still be in flight.
    wait_until(lambda: present(job.status()["window"])["windowRows"] == RANGES)
    status = running_source("jobs").ask("status")
    assert (status["executor"], len(status["ranges"])) == ("batches", RANGES)
    assert status.keys() == Status.__annotations__.keys()
    assert status["ranges"][0].keys() == RangeStatus.__annotations__.keys()
    assert status["partitions"][0].keys() == PartitionStatus.__annotations__.keys()
    with pytest.raises(SystemExit):
        main(["status", "jobs"])
    assert f"received {RANGES} rows, acknowledged 0 entries" in capsys.readouterr().out
    assert all(each["covered"] for each in status["partitions"])
    first = status["ranges"][0]
    assert [first[name] for name in ("waiting", "inFlight", "handled")] == [None] * 3
    explained = running_source("jobs").ask("explain", key=KEYS[0])
    assert (explained["range"], explained["lane"], explained["waiting"]) == (0, None, None)
    with pytest.raises(SystemExit):
        main(["explain", KEYS[0], "--subscription", "jobs"])
    output = capsys.readouterr().out
    assert "none: the source has no handlers" in output
    assert "waiting unknown" in output
    assert running_source("jobs").ask("rescale", ranges=2)["epoch"] == 1
    assert len(job.status()["ranges"]) == 2
    batch.ack()
    batches.close()
    assert running_sources() == []
