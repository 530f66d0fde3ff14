"""Status, watchdog, control socket and metrics of a running source."""

from __future__ import annotations

import json
import logging
import threading
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, get_type_hints

import httpx
import pytest
import tenacity

from keyshard import KeyShardSource, Message, RetryPolicy
from keyshard.broker.connect import connect_admin
from keyshard.broker.memory import LookAhead, MemoryBroker, MemoryCluster
from keyshard.broker.memory import Message as Stored
from keyshard.broker.memory.admin import MemoryAdmin
from keyshard.broker.memory.dispatch import Subscription
from keyshard.broker.port import Broker, StartPosition
from keyshard.cli import main
from keyshard.config.connection import Connection
from keyshard.control import running_source, running_sources
from keyshard.coordinator.coordinator import Coordinator
from keyshard.coordinator.progress import Progress
from keyshard.core import partition_watchdog, range_watchdog, rates
from keyshard.core.position.entry import TopicPartition
from keyshard.core.recent_history import CommitsStatus
from keyshard.core.rescale_history import (
    DrainedMessage,
    RescaleStatus,
    RescaleSummary,
    RunningRescaleStatus,
)
from keyshard.core.ring.hash_range import range_index, split_ring
from keyshard.core.ring.key_slot import key_slot, possible_slots
from keyshard.errors import (
    BrokerError,
    ConfigError,
    ControlError,
    DrainTimeoutError,
    NotRunningError,
    TopicNotFoundError,
)
from keyshard.observe import broker_poll, monitor
from keyshard.observe import status as status_module
from keyshard.observe.broker_poll import BrokerPoll
from keyshard.observe.status_types import (
    NewestErrorStatus,
    PartitionStatus,
    RangeStatus,
    Shares,
    Stalled,
    Status,
)
from tests.helpers import key_in, present, wait_until
from tests.support.deadlines import deadline
from tests.support.faulty_broker import ScriptedCall, faulty
from tests.support.memory_topic import MemoryTopic, Run

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
RANGES = 4
KEYS = [key_in(hash_range) for hash_range in split_ring(RANGES)]
FAILING = RetryPolicy(wait=tenacity.wait_fixed(60), stop=tenacity.stop_never)


class Job:
    """A source of four ranges over two topic partitions, running in a thread."""

    def __init__(self) -> None:
        made = MemoryTopic()
        self.url, self.cluster, self.topic = made.url, made.cluster, made.topic
        self.release = threading.Event()
        self.hung: list[Message] = []
        self.handled: list[Message] = []
        self.source = made.source(subscription="jobs", parallelism=RANGES, admin_url=made.url)
        self.run: Run | None = None

    def handle(self, message: Message) -> None:
        """Hangs on the value ``hang``, raises on ``fail``."""
        if message.value == b"hang":
            self.hung.append(message)
            assert self.release.wait(deadline(60))
        if message.value == b"fail" and not self.release.is_set():
            raise ValueError("not now")
        self.handled.append(message)

    def publish(self, *values: tuple[str, bytes]) -> None:
        self.cluster.publish(self.topic, *(Stored(value, key=key) for key, value in values))

    def start(self, **options: Any) -> None:
        self.run = run = Run(self.source, self.handle, options)
        run.thread.start()
        wait_until(lambda: run.error or self.shown())
        assert run.error is None, run.error

    def shown(self) -> bool:
        try:
            return self.status()["state"] == "running"
        except NotRunningError:
            return False

    def status(self) -> Status:
        return self.source.status()

    def range(self, index: int) -> RangeStatus:
        return self.status()["ranges"][index]

    def stop(self) -> None:
        self.release.set()
        if self.run is not None:
            self.run.end()


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.stop()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog looks often and waits for less."""
    monkeypatch.setattr(monitor, "LOOK_S", 0.02)
    monkeypatch.setattr(range_watchdog, "STALL_S", 0.3)
    monkeypatch.setattr(broker_poll, "FACTS_ROUND_S", 0.05)


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
    while job.status()["counters"]["completed"] < 1_000:
        looks += job.status()["ranges"]
        time.sleep(0.01)
    done.set()
    assert {each["state"] for each in looks if each["waiting"]} == {"running"}
    assert [each["blockedBy"] for each in looks if each["blockedBy"]] == []


def test_a_key_that_waits_for_its_retry_blocks_its_range_and_is_explained(
    job: Job, quick: None, caplog: pytest.LogCaptureFixture
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


def test_a_consumer_that_is_away_is_named_and_leaves_a_gap(job: Job, quick: None) -> None:
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


def test_status_is_plain_json_with_counts_and_facts_of_the_broker(job: Job, quick: None) -> None:
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
    assert status["handlerSeconds"]["count"] == 15
    for each in status["partitions"]:
        # The limits are those of Pulsar 5.0.
        assert each["replayMax"] == RANGES * 4_000
        assert each["ackGapsMax"] == 200_000
        assert each["replay"] == 0
    assert status["brokerError"] == ""
    assert status["parked"] == []


def test_a_topic_partition_without_an_answer_of_the_broker_hides_no_other(
    job: Job, quick: None, monkeypatch: pytest.MonkeyPatch
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
    quick: None, monkeypatch: pytest.MonkeyPatch
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


def test_a_stalled_topic_partition_is_named_while_its_ranges_are_busy_with_others(
    job: Job, quick: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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


def test_a_topic_partition_does_not_stall_while_its_window_is_full(
    job: Job, quick: None, monkeypatch: pytest.MonkeyPatch
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
    nested = (status["counters"], status["handlerSeconds"], status["lag"], status["rates"])
    shares = get_type_hints(Shares)
    history = [*present(status["history"]), *HISTORY]
    for name in [*status, *chain(*nested), *range_, *partition, *shares, *NEWEST, *history]:
        assert f"`{name}`" in output, name
    for state in range_watchdog.RangeState:
        assert f"| `{state.value}` |" in output, state


def test_a_paused_source_shows_how_long_its_messages_have_waited(job: Job, quick: None) -> None:
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
    job: Job, quick: None, monkeypatch: pytest.MonkeyPatch
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
    job: Job, quick: None, monkeypatch: pytest.MonkeyPatch
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


def test_a_stream_of_open_is_found_by_its_name_until_it_is_closed(job: Job) -> None:
    job.source = KeyShardSource(
        job.topic, subscription="jobs", name="invoices", parallelism=2, service_url=job.url,
        admin_url=job.url, starting_position="earliest",
    )  # fmt: skip
    job.publish(*((key, b"1") for key in KEYS))
    with job.source.open() as stream:
        found = running_source("invoices")
        assert (found.kind, found.subscription) == ("stream", "jobs")
        wait_until(lambda: found.ask("status")["window"]["windowRows"] == len(KEYS))
        status: Status = found.ask("status")
        assert (status["state"], status["kind"], status["executor"]) == (
            "running", "stream", "batches",
        )  # fmt: skip
        assert [each["hashRanges"] for each in status["ranges"]] == [["0-32767"], ["32768-65535"]]
        wait_until(lambda: (found.ask("status")["lag"]["seconds"] or 0) > 0)
        assert found.ask("explain", key=KEYS[0])["range"] == 0
        with pytest.raises(ConfigError, match="fixed while it runs"):
            found.ask("rescale", ranges=4)
        batch = present(stream.next_batch(timeout_s=deadline(20)))
        stream.commit(batch)
        wait_until(lambda: found.ask("status")["lag"]["rows"] == 0)
        wait_until(lambda: found.ask("status")["rates"]["received"] is not None)
        rates = found.ask("status")["rates"]
        assert (rates["completed"], rates["failedAttempts"]) == (None, None), "no handlers"
    assert running_sources() == []


def test_a_rescale_is_planned_without_a_move(job: Job) -> None:
    job.start()
    source = running_source("jobs")
    assert source.ask("rescale", ranges=8, dry_run=True) == {
        "before": 4, "after": 8, "movedFraction": 0.5, "moves": 4,
    }  # fmt: skip
    assert job.status()["epoch"] == 0
    for wrong in ({}, {"balance": True}, {"ranges": "8"}):
        with pytest.raises(ConfigError, match="dry_run needs"):
            source.ask("rescale", dry_run=True, **wrong)
    with pytest.raises(ConfigError, match="70000"):
        source.ask("rescale", dry_run=True, ranges=70_000)


def test_a_stream_that_does_not_start_leaves_no_control_socket(job: Job) -> None:
    source = KeyShardSource("no-such-topic", subscription="jobs", service_url=job.url)
    with pytest.raises(TopicNotFoundError):
        source.open()
    assert running_sources() == []


def test_without_admin_url_the_broker_is_not_asked(job: Job) -> None:
    job.source = KeyShardSource(
        job.topic, subscription="jobs", service_url=job.url, starting_position="earliest"
    )
    job.start()
    (first, _) = job.status()["partitions"]
    assert first["covered"]
    assert {first[name] for name in ("backlog", "ackGaps", "replay", "replayMax")} == {None}


def test_an_admin_interface_that_is_away_holds_nothing_up(
    job: Job, quick: None, monkeypatch: pytest.MonkeyPatch
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


def test_the_commands_reach_a_running_source_until_it_ends(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.start()
    job.publish((KEYS[0], b"hang"))
    wait_until(lambda: job.hung)

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as caught:
            main(list(arguments))
        assert caught.value.code in (None, 0)
        return capsys.readouterr().out

    assert json.loads(run("status", "jobs", "--json"))["subscription"] == "jobs"
    assert "'jobs' on" in run("status")
    assert f"lane    running, message {job.hung[0].message_id}" in run("explain", KEYS[0])
    assert "4 ranges to 8: 50.0% of the ring moves" in run("rescale", "8", "--dry-run")
    job.stop()
    with pytest.raises(ControlError):
        running_source("jobs")
    assert running_sources() == []
    with pytest.raises(NotRunningError):
        job.source.status()


ONCE = RetryPolicy(wait=tenacity.wait_none(), stop=tenacity.stop_after_attempt(1))


def test_a_parked_key_is_shown_and_unparked_by_command(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.start(retry=ONCE)
    job.publish((KEYS[1], b"fail"), (KEYS[1], b"behind"))
    parked = {"key": KEYS[1], "deadLetters": 2}
    wait_until(lambda: job.status()["parked"] == [parked])
    assert job.status()["parkedKeys"] == 1
    counters = {
        "completed": 0,
        "failedAttempts": 1,
        "parked": 2,
        "deadLettered": 2,
        "rejected": 0,
        "observerErrors": 0,
        "outputsPublished": 0,
        "outputsConfirmed": 0,
        "outputsFailed": 0,
    }
    wait_until(lambda: job.status()["counters"] == counters)
    assert running_source("jobs").ask("explain", key=KEYS[1])["parked"]
    job.release.set()
    for says in ("Unparking 1 key: 2 dead letters in order", "No parked key matches"):
        with pytest.raises(SystemExit):
            main(["dead-letters", "replay", "--key", KEYS[1]])
        assert says in capsys.readouterr().out
        wait_until(lambda: not job.status()["parked"])
    assert [message.value for message in job.handled] == [b"fail", b"behind"]
    wait_until(lambda: job.status()["counters"] == counters | {"completed": 2})


def test_a_rescale_by_command_is_shown(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.start()
    job.publish((KEYS[0], b"hang"), *((key, b"fine") for key in KEYS))
    wait_until(lambda: len(job.handled) == RANGES - 1 and job.hung)
    job.release.set()
    with pytest.raises(SystemExit) as caught:
        main(["rescale", "5"])
    assert caught.value.code in (None, 0)
    assert "4 ranges to 5: 20.0% of the ring moved, at least 20.0% were necessary" in (
        capsys.readouterr().out
    )
    status = job.status()
    assert (status["epoch"], len(status["ranges"])) == (1, 5)
    assert (status["workers"], status["workersMax"]) == (5 * status["lanes"], 256)
    assert len(status["ranges"][4]["hashRanges"]) == 4
    assert all(each["covered"] for each in status["partitions"])
    job.publish(*((key, b"later") for key in KEYS))
    wait_until(lambda: len(job.handled) == 2 * RANGES + 1)
    with pytest.raises(ConfigError):
        running_source("jobs").ask("rescale", ranges=0)
    with pytest.raises(ConfigError):
        running_source("jobs").ask("rescale")


def test_hot_keys_are_named(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.start()
    hot = "order\x1b[2J" + "x" * 2_000
    job.publish(*((hot, b"fine") for _ in range(70)), *((f"k{n}", b"fine") for n in range(30)))
    wait_until(lambda: len(job.handled) == 100)
    first, *others = job.status()["hotKeys"]
    assert first["key"] == f"{hot[:1_000]}..."
    assert (first["share"], len(others)) == (0.7, 4)
    assert first["ranges"] == sorted({explained(hot, name) for name in ("text", "bytes")})
    assert all(one["share"] == 0.01 for one in others)
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


def test_metrics_are_served_while_it_runs(job: Job) -> None:
    job.start(metrics_port=0)
    port = job.source.__dict__["_running"]._monitor.metrics_port
    url = f"http://127.0.0.1:{port}/metrics"
    job.publish(*((key, b"fine") for key in KEYS))
    wait_until(
        lambda: (
            'keyshard_messages_completed_total{subscription="jobs"} 4.0'
            in httpx.get(url, trust_env=False).text
        )
    )
    count = 'keyshard_handler_seconds_count{subscription="jobs"} 4.0'
    assert count in httpx.get(url, trust_env=False).text
    job.stop()
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False)


class HeldUp(KeyShardSource):
    """A source whose broker takes its time to connect."""

    def coordinator(self) -> Coordinator:
        return Coordinator(self, self.__dict__["_connect"])


def test_a_starting_source_reports_its_start_and_takes_nothing(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    def connect() -> Broker:
        assert job.release.wait(deadline(60))
        return MemoryBroker(job.cluster)

    job.source = HeldUp(job.topic, subscription="jobs", parallelism=RANGES, service_url=job.url)
    object.__setattr__(job.source, "_connect", connect)
    thread = threading.Thread(target=job.source.run, args=[job.handle], kwargs={"metrics_port": 0})
    thread.start()
    wait_until(lambda: running_sources("jobs"))
    status = job.source.status()
    assert (status["state"], status["ranges"], status["partitions"]) == ("starting", [], [])
    assert (status["parkedKeys"], status["malformedDeadLetters"]) == (None, None)
    with pytest.raises(SystemExit):
        main(["status", "jobs"])
    assert "starting: 'jobs' on" in capsys.readouterr().out
    requests: list[tuple[str, dict[str, Any]]] = [
        ("rescale", {"ranges": 2}), ("pause", {}), ("resume", {}),
        *((do, {"key": "k"}) for do in ASKS),
    ]  # fmt: skip
    for do, fields in requests:
        with pytest.raises(NotRunningError, match="starting"):
            running_source("jobs").ask(do, **fields)
    assert probe(job, "/livez") == (200, "ok")
    assert probe(job, "/readyz") == (503, "The source is starting.")
    job.release.set()
    wait_until(lambda: job.source.status()["state"] == "running")
    assert probe(job, "/readyz") == (200, "ok")
    job.source.stop()
    thread.join(deadline(30))
    assert not thread.is_alive()


ASKS = ("explain", "unpark")


def probe(job: Job, path: str) -> tuple[int, str]:
    port = job.source.__dict__["_running"]._monitor.metrics_port
    answer = httpx.get(f"http://127.0.0.1:{port}{path}", trust_env=False)
    return answer.status_code, answer.text.strip()


def test_probes_show_the_state_of_the_run(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.start(metrics_port=0, drain_timeout_s=60)
    assert probe(job, "/readyz") == (200, "ok")
    partitions = job.cluster.partitions(job.topic)
    (client,) = job.cluster._clients
    consumers = client.drop(partitions)
    wait_until(lambda: probe(job, "/readyz")[0] == 503)
    assert probe(job, "/readyz")[1] == (
        f"Some consumers are not connected to {partitions[0]} and 1 more."
    )
    assert probe(job, "/livez") == (200, "ok"), "a restart would not bring the broker back"
    client.reconnect(consumers)
    wait_until(lambda: probe(job, "/readyz") == (200, "ok"))
    monkeypatch.setattr(status_module, "LIVE_S", 0.0)
    assert probe(job, "/livez")[0] == 503
    monkeypatch.undo()
    job.publish((KEYS[0], b"hang"))
    wait_until(lambda: job.hung)
    job.source.stop()
    assert probe(job, "/readyz") == (503, "The source is stopping.")
    assert probe(job, "/livez") == (200, "ok")


def test_a_metrics_port_that_is_taken_ends_the_run_with_an_error(job: Job) -> None:
    job.start(metrics_port=0)
    port = job.source.__dict__["_running"]._monitor.metrics_port
    other = Job()
    with pytest.raises(AssertionError, match="metrics_port"):
        other.start(metrics_port=port)
    assert other.run is not None
    other.run.thread.join(deadline(30))
    assert not other.run.thread.is_alive()
