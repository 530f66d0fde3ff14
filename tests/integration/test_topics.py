"""Topics are created, grow and are deleted on a real broker, in the embedded runtime."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing

import httpx
import pytest

from keyshard import KeyShardSource, SourceStream
from keyshard.broker.admin.rest import PulsarAdmin
from keyshard.coordinator import discovery
from keyshard.core.position.entry import TopicPartition, full_topic_name
from keyshard.errors import BrokerError, DataLossTrimmedError, TopicNotFoundError
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import (
    Workload,
    create_partitioned_topic,
    parse_value,
    produce,
)
from tests.helpers import started, wait_until
from tests.support.deadlines import deadline, in_time
from tests.support.tested_pulsar import PULSAR

pytestmark = pytest.mark.broker

DEADLINE_S = deadline(180)
LOAD = Workload(messages=2_000, keys=50, entry_messages=4)


class Job:
    """A stream, and how often each message of each topic came."""

    def __init__(self, broker: DevBroker, stream: SourceStream) -> None:
        self.broker = broker
        self.stream = stream
        self.got: Counter[tuple[str, str, int]] = Counter()
        self.sent: dict[tuple[str, str], int] = {}
        self.checkpoint = ""

    def produce(self, topic: str, load: Workload = LOAD) -> None:
        """Publish; for every key of a topic, sequence numbers count from 0 at its first load."""
        report = produce(load, self.broker.service_url, topic)
        for key, count in report.per_key.items():
            self.sent[topic, key] = count

    def pump(self, until: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
        """Take and commit batches until a condition holds."""

        def turn() -> bool:
            batch = self.stream.next_batch(timeout_s=0.05)
            if batch is not None:
                for rows in batch:
                    columns = rows.column("__topic").to_pylist(), rows.column("value").to_pylist()
                    for topic, value in zip(*columns, strict=True):
                        key, seq = parse_value(value)
                        self.got[topic.rpartition("/")[2], key, seq] += 1
                self.stream.commit(batch)
                self.checkpoint = batch.checkpoint
            return until()

        wait_until(turn, deadline_s)

    def has(self, *topics: str) -> bool:
        """Whether all that was published to some topics has come."""
        wanted = sum(count for (topic, _), count in self.sent.items() if topic in topics)
        return sum(n for (topic, *_), n in self.got.items() if topic in topics) >= wanted

    def check(self, *topics: str) -> None:
        """Assert that every message of some topics came exactly once."""
        wanted = {
            (topic, key, seq): 1
            for (topic, key), count in self.sent.items()
            if topic in topics
            for seq in range(count)
        }
        assert {row: n for row, n in self.got.items() if row[0] in topics} == wanted

    def status(self, name: str) -> object:
        return dict(self.stream.status())[name]


@pytest.fixture
def api(dev_broker: DevBroker) -> Iterator[httpx.Client]:
    base = f"{dev_broker.admin_url}/admin/v2/persistent/public/default/"
    with httpx.Client(base_url=base, timeout=deadline(20)) as client:
        yield client


def source(broker: DevBroker, **fields: object) -> KeyShardSource:
    defaults = {
        "subscription": "s",
        "service_url": broker.service_url,
        "admin_url": broker.admin_url,
        "parallelism": 4,
        "starting_position": "earliest",
        "discovery_interval_ms": 300,
    }
    return KeyShardSource(**(defaults | fields))  # type: ignore[arg-type]


def stored(api: httpx.Client, prefix: str) -> set[str]:
    """Names of topics and topic partitions that exist, without tenant and namespace."""
    names = {name.rpartition("/")[2] for name in api.get("").raise_for_status().json()}
    return {name for name in names if name.startswith(prefix)}


def delete(api: httpx.Client, topic: str, partitioned: bool) -> None:
    """Delete a topic; again where a busy broker refuses it, because consumers come back."""
    path = f"{topic}/partitions" if partitioned else topic

    def deleted() -> bool:
        try:
            answer = api.delete(path, params={"force": "true"})
        except httpx.ReadTimeout:
            return False
        return answer.is_success or answer.status_code == httpx.codes.NOT_FOUND

    wait_until(deleted, DEADLINE_S)


def test_topics_come_grow_and_go_and_no_message_is_missed_or_repeated(
    dev_broker: DevBroker, api: httpx.Client, topic_name: str
) -> None:
    first, late, plain, parted = (f"{topic_name}-{name}" for name in ("a", "b", "c", "d"))
    create_partitioned_topic(dev_broker.admin_url, first, 5)
    create_partitioned_topic(dev_broker.admin_url, parted, 3)
    api.put(plain).raise_for_status()
    with source(dev_broker, topics_pattern=f"{topic_name}-.*").open() as stream:
        job = Job(dev_broker, stream)
        for topic in (first, parted, plain):
            job.produce(topic)
        job.pump(lambda: job.has(first, parted, plain))

        create_partitioned_topic(dev_broker.admin_url, late, 2)
        job.produce(late)
        api.post(f"{first}/partitions", json=8).raise_for_status()
        job.produce(first, Workload(messages=6_000, keys=200, entry_messages=4))
        first_again = sum(n for (topic, _), n in job.sent.items() if topic == first)
        job.pump(lambda: job.has(late) and job.status("topicPartitions") == 8 + 3 + 1 + 2)
        job.pump(lambda: total(job, first) >= LOAD.messages + first_again)

        delete(api, plain, partitioned=False)
        delete(api, parted, partitioned=True)
        job.pump(lambda: job.status("topicPartitions") == 10)
        job.pump(lambda: not stored(api, plain) | stored(api, parted))
        job.produce(late, LOAD)
        job.pump(lambda: total(job, late) >= 2 * LOAD.messages)
        # Four more rounds, in which a reconnect could bring one back.
        threading.Event().wait(1.2)
        assert not stored(api, plain) | stored(api, parted)
        assert job.status("partitionsGone") == 4
        # A round that a busy broker does not answer in time is made again.
        job.pump(lambda: job.status("discoveryError") == "")
        job.pump(lambda: backlog(dev_broker, first, 8) == backlog(dev_broker, late, 2) == 0)
        assert stream.next_batch(timeout_s=0) is None
    assert total(job, plain) == total(job, parted) == LOAD.messages
    job.check(plain, parted)
    twice = Counter({row: n for row, n in job.got.items() if row[0] == late})
    assert set(twice.values()) == {2}, "the same load twice"
    assert total(job, first) == LOAD.messages + first_again


@pytest.mark.parametrize("by_pattern", [True, False])
def test_topics_that_the_broker_reports_are_found_long_before_the_next_round(
    dev_broker: DevBroker, api: httpx.Client, topic_name: str, by_pattern: bool
) -> None:
    first, late = f"{topic_name}-a", f"{topic_name}-b"
    create_partitioned_topic(dev_broker.admin_url, first, 2)
    names: dict[str, object] = (
        {"topics_pattern": f"{topic_name}-.*"} if by_pattern else {"topics": [first]}
    )
    slow = source(dev_broker, discovery_interval_ms=86_400_000, **names)
    with slow.open() as stream:
        job = Job(dev_broker, stream)
        api.post(f"{first}/partitions", json=5).raise_for_status()
        create_partitioned_topic(dev_broker.admin_url, late, 2)
        job.produce(first)
        job.produce(late)
        expected = (first, late) if by_pattern else (first,)
        job.pump(lambda: job.has(*expected), deadline(30))
        job.check(*expected)
        if by_pattern:
            delete(api, late, partitioned=True)
            job.pump(lambda: job.status("topicPartitions") == 5, deadline(30))


def total(job: Job, topic: str) -> int:
    return sum(n for (name, *_), n in job.got.items() if name == topic)


def backlog(broker: DevBroker, topic: str, partitions: int) -> int:
    with closing(PulsarAdmin(broker.connection)) as admin:
        stats = [
            admin.subscription(TopicPartition(full_topic_name(topic), i), "s")
            for i in range(partitions)
        ]
    return sum(int(one["msgBacklog"]) if one else 10**9 for one in stats)


def test_a_deleted_topic_that_is_created_again_is_consumed_again(
    dev_broker: DevBroker, api: httpx.Client, topic_name: str
) -> None:
    create_partitioned_topic(dev_broker.admin_url, topic_name, 3)
    with source(dev_broker, topics=[topic_name], starting_position="latest").open() as stream:
        job = Job(dev_broker, stream)
        delete(api, topic_name, partitioned=True)
        job.pump(lambda: job.status("topicPartitions") == 0 and not stored(api, topic_name))
        create_partitioned_topic(dev_broker.admin_url, topic_name, 2)
        job.produce(topic_name)
        job.pump(lambda: job.has(topic_name))
        job.check(topic_name)


def test_a_topic_created_again_between_two_rounds_is_consumed_again(
    dev_broker: DevBroker, api: httpx.Client, topic_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "SETTLE_S", 86_400.0)
    create_partitioned_topic(dev_broker.admin_url, topic_name, 3)
    slow = source(
        dev_broker, topics=topic_name, starting_position="latest", discovery_interval_ms=86_400_000
    )
    with slow.open() as stream:
        job = Job(dev_broker, stream)
        delete(api, topic_name, partitioned=True)
        wait_until(lambda: created_again(api, topic_name, 3), DEADLINE_S)
        job.produce(topic_name)
        job.pump(lambda: job.has(topic_name))
        job.check(topic_name)


def test_a_topic_created_again_is_consumed_if_reconnects_may_not_create_it(
    dev_broker: DevBroker, topic_name: str
) -> None:
    """If the topic is missing when a consumer reconnects, the consumer never returns by itself."""
    namespace = f"public/{topic_name}"
    with httpx.Client(base_url=f"{dev_broker.admin_url}/admin/v2/", timeout=deadline(20)) as api:
        api.put(f"namespaces/{namespace}").raise_for_status()
        policy = {"allowAutoTopicCreation": False}
        api.post(f"namespaces/{namespace}/autoTopicCreation", json=policy).raise_for_status()
        parted, plain = f"{namespace}/parted", f"{namespace}/plain"
        create_partitioned_topic(dev_broker.admin_url, parted, 2)
        api.put(f"persistent/{plain}").raise_for_status()
        with source(dev_broker, topics=[parted, plain]).open() as stream:
            job = Job(dev_broker, stream)
            for path in (f"{parted}/partitions", plain):
                api.delete(f"persistent/{path}", params={"force": "true"}).raise_for_status()
            for topic, path, body in ((parted, f"{parted}/partitions", "2"), (plain, plain, "")):
                publish_again(dev_broker, api, topic, f"persistent/{path}", body)
            job.pump(lambda: job.got.total() >= 2 * LOAD.messages)
            # A consumer may come back by itself: then the next round takes its topic for a new one.
            job.pump(lambda: job.status("topicPartitions") == 3)
            assert set(job.got.values()) == {1}


def publish_again(
    broker: DevBroker, api: httpx.Client, topic: str, path: str, partitions: str
) -> None:
    """Create a deleted topic again and publish to it.

    A broker that answers a consumer's lookup while the topic is created may remember for minutes
    that there is no such topic, and says so to each producer. Deleting and creating it once more,
    as an operator would, makes it forget that.
    """
    end = time.monotonic() + DEADLINE_S
    headers = {"Content-Type": "application/json"}
    while True:
        api.put(path, content=partitions, headers=headers).raise_for_status()
        try:
            wait_until(lambda: published(broker, topic), deadline_s=deadline(15))
        except AssertionError:
            in_time(end, f"nothing can be published to {topic}")
            api.delete(path, params={"force": "true"}).raise_for_status()
        else:
            return


def published(broker: DevBroker, topic: str) -> bool:
    """Publish to a topic, unless the broker says that there is none."""
    try:
        produce(LOAD, broker.service_url, topic)
    except BrokerError as exc:
        if "TopicNotFound" not in exc.message:
            raise
        return False
    return True


def created_again(api: httpx.Client, topic: str, partitions: int) -> bool:
    """Create a topic unless what reconnects brought back is in the way; then delete that."""
    for name in stored(api, topic):
        api.delete(name, params={"force": "true"})
    return api.put(f"{topic}/partitions", json=partitions).is_success


def test_without_admin_growth_and_deletion_are_seen_too(
    dev_broker: DevBroker, api: httpx.Client, topic_name: str
) -> None:
    grows, goes = f"{topic_name}-grows", f"{topic_name}-goes"
    for topic in (grows, goes):
        create_partitioned_topic(dev_broker.admin_url, topic, 2)
    with source(dev_broker, topics=[grows, goes], admin_url=None).open() as stream:
        job = Job(dev_broker, stream)
        job.produce(goes)
        job.pump(lambda: job.has(goes))
        delete(api, goes, partitioned=True)
        api.post(f"{grows}/partitions", json=4).raise_for_status()
        job.produce(grows)
        job.pump(lambda: job.has(grows) and job.status("topicPartitions") == 4)
        assert goes not in stored(api, goes), "not brought back as a topic without partitions"
        job.check(grows, goes)


def test_precedence_checkpoint_then_subscription_then_starting_position(
    dev_broker: DevBroker,
    api: httpx.Client,
    topic_name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    create_partitioned_topic(dev_broker.admin_url, topic_name, 2)
    latest = source(dev_broker, topics=topic_name, starting_position="latest")
    earliest = source(dev_broker, topics=topic_name)
    produce(LOAD, dev_broker.service_url, topic_name)
    with caplog.at_level(logging.WARNING, "keyshard.broker.topics"), latest.open() as stream:
        assert stream.next_batch(timeout_s=1) is None, "startingOffsets=latest skips what is there"
    assert not warned(caplog)
    one = Workload(messages=500, keys=10, entry_messages=5)
    produce(one, dev_broker.service_url, topic_name)
    with caplog.at_level(logging.WARNING, "keyshard.broker.topics"), earliest.open() as stream:
        job = Job(dev_broker, stream)
        job.pump(lambda: job.got.total() >= 500)
        assert stream.next_batch(timeout_s=0.5) is None, "the subscription comes before earliest"
    assert "exists on 2 of 2 topic partitions, with a backlog of 100 entries" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING), latest.open(job.checkpoint) as stream:
        again = Job(dev_broker, stream)
        again.produce(topic_name, one)
        again.pump(lambda: again.has(topic_name))
        again.check(topic_name)
    assert not warned(caplog), "with a checkpoint, no starting position was to apply"


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Log lines about topics, without those of the client."""
    return [one.message for one in caplog.records if one.name == "keyshard.broker.topics"]


def test_a_planned_batch_of_a_deleted_topic_is_data_loss_and_creates_nothing(
    dev_broker: DevBroker, api: httpx.Client, topic_name: str
) -> None:
    create_partitioned_topic(dev_broker.admin_url, topic_name, 2)
    here = source(dev_broker, topics=topic_name)
    with here.open() as stream:
        produce(LOAD, dev_broker.service_url, topic_name)
        batch = stream.next_batch(timeout_s=DEADLINE_S)
        assert batch is not None
    delete(api, topic_name, partitioned=True)
    coordinator = here.coordinator()
    with started(coordinator, batch.end, planned=True):
        with pytest.raises(DataLossTrimmedError):
            coordinator.batches.plan(batch.end)
        assert stored(api, topic_name) == set()
    with pytest.raises(TopicNotFoundError), here.open():
        pass


def consumers(broker: DevBroker, topic: str) -> int:
    """Consumers of two topic partitions."""
    with closing(PulsarAdmin(broker.connection)) as admin:
        stats = [
            admin.subscription(TopicPartition(full_topic_name(topic), i), "s") for i in range(2)
        ]
    return sum(len(one["consumers"]) for one in stats if one)


def test_a_broker_that_is_away_for_a_while_ends_nothing(topic_name: str) -> None:
    with DevBroker(PULSAR) as broker:
        create_partitioned_topic(broker.admin_url, f"{topic_name}-a", 2)
        with source(broker, topics_pattern=f"{topic_name}-.*").open() as stream:
            job = Job(broker, stream)
            broker.kill()
            wait_until(lambda: job.status("discoveryError") != "", DEADLINE_S)
            broker.start()
            create_partitioned_topic(broker.admin_url, f"{topic_name}-b", 3)
            job.produce(f"{topic_name}-b")
            job.produce(f"{topic_name}-a")
            job.pump(lambda: job.has(f"{topic_name}-b"))
            # The client's own reconnects wait longer and longer.
            job.pump(lambda: job.has(f"{topic_name}-a"), 150)
            job.pump(lambda: job.status("discoveryError") == "")
            job.check(f"{topic_name}-a", f"{topic_name}-b")
