"""The topic of the dead letters of a source: refused ones, and those that a pattern leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest

from keyshard.broker.memory import Message as Stored
from keyshard.core.position.entry import TopicPartition
from keyshard.errors import ConfigError
from tests.helpers import wait_until
from tests.support.deadlines import deadline
from tests.support.parking_topic import ParkingTopic

pytestmark = pytest.mark.simulated(seeds=1)


def test_the_dead_letter_topic_must_not_be_consumed_itself(parking: ParkingTopic) -> None:
    with pytest.raises(ConfigError, match="which this source consumes"):
        parking.run(dead_letter_topic="orders").source.run(
            parking.handle, dead_letter_topic=parking.topic
        )


def test_a_partitioned_dead_letter_topic_is_refused(parking: ParkingTopic) -> None:
    parking.cluster.create_topic("letters", partitions=2)
    run = parking.run(dead_letter_topic="letters")
    with run:
        run.thread.join(deadline(20))
    assert isinstance(run.error, ConfigError)
    assert "partitioned" in str(run.error)


def test_a_pattern_does_not_match_the_dead_letters_of_its_own_source(parking: ParkingTopic) -> None:
    parking.broken = {"b"}
    parking.publish(*"ab" * 3)
    pattern = {"topics_pattern": "persistent://public/default/.*", "admin_url": parking.url}
    dead_letters = TopicPartition("persistent://public/default/keyshard-DLQ")
    for number in range(2):
        with parking.run(discovery_interval_ms=20, **pattern):
            wait_until(lambda: parking.backlog() == 0)
            later = parking.cluster.create_topic(f"later-{number}")
            parking.cluster.publish(later, Stored(b"0", key=f"later-{number}"))

            def handled(key: str = f"later-{number}") -> bool:
                return parking.handled[key] == [0]

            wait_until(handled)
    assert len(parking.cluster.log(dead_letters)) == 3
    assert list(parking.cluster.subscriptions(dead_letters)) == ["keyshard-parked"]
    with pytest.raises(ConfigError, match="which this source consumes"):
        parking.run(**pattern).source.run(parking.handle, dead_letter_topic="other-dead")


def test_two_pattern_sources_do_not_feed_each_other(parking: ParkingTopic) -> None:
    parking.broken = {"b"}
    parking.publish(*"ab" * 3)
    first = {"topics_pattern": "persistent://public/default/.*", "admin_url": parking.url}
    second = first | {"subscription": "audit"}
    options = {"discovery_interval_ms": 20, "on_failure": "dead_letter"}
    with parking.run(**first, **options), parking.run(**second, **options):
        wait_until(lambda: parking.backlog() == 0 and parking.backlog("audit") == 0)
        later = parking.cluster.create_topic("later")
        parking.cluster.publish(later, Stored(b"0", key="later"))
        wait_until(lambda: parking.handled["later"] == [0, 0])
    for subscription in ("keyshard", "audit"):
        dead_letters = TopicPartition(f"persistent://public/default/{subscription}-DLQ")
        assert len(parking.cluster.log(dead_letters)) == 3
        assert list(parking.cluster.subscriptions(dead_letters)) == [f"{subscription}-parked"]


def test_a_pattern_leaves_out_the_dead_letter_topic_of_another_source(
    parking: ParkingTopic,
) -> None:
    parking.broken = {"b"}
    parking.publish(*"ab" * 3)
    pattern = {"topics_pattern": "persistent://public/default/.*", "admin_url": parking.url}
    with parking.run(dead_letter_topic="dead"):
        wait_until(lambda: parking.backlog() == 0)
        with parking.run(**pattern, subscription="audit", discovery_interval_ms=20):
            wait_until(lambda: parking.backlog("audit") == 0)
    dead = TopicPartition("persistent://public/default/dead")
    assert list(parking.cluster.subscriptions(dead)) == ["keyshard-parked"]


@pytest.mark.parametrize("admin", [False, True])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_topic_added_in_front_forgets_no_parked_key(
    parking: ParkingTopic, tmp_path: Path, *, admin: bool, checkpoint: bool
) -> None:
    options: dict[str, object] = {"admin_url": parking.url} if admin else {}
    if checkpoint:
        options["checkpoint"] = f"file://{tmp_path / 'checkpoint.json'}"
    parking.broken = {"b"}
    parking.publish(*"b" * 2)
    with parking.run(**options):
        wait_until(lambda: len(parking.dead_letters()) == 2 and parking.backlog() == 0)
    front = parking.cluster.create_topic("front")
    parking.broken.clear()
    parking.publish("b")
    with parking.run(topics=[front, parking.topic], **options) as run:
        wait_until(lambda: len(parking.dead_letters()) == 3)
        assert parking.handled["b"] == []
        run.source.unpark("b")
        wait_until(lambda: parking.handled["b"] == [0, 1, 2])


def test_dead_letters_in_two_topics_are_not_forgotten(parking: ParkingTopic) -> None:
    other = parking.cluster.create_topic("other")
    parking.broken = {"b"}
    parking.publish("b")
    parking.cluster.publish(other, Stored(b"0", key="b"))
    for topic in (parking.topic, other):
        dead = TopicPartition(f"{topic}-keyshard-DLQ")
        with parking.run(topics=topic):

            def rests(dead: TopicPartition = dead) -> bool:
                return parking.resting(dead) == 1

            wait_until(rests)
    with parking.run(topics=[other, parking.topic]) as run:
        run.thread.join(deadline(20))
    assert isinstance(run.error, ConfigError)
    assert "orders-keyshard-DLQ" in str(run.error)
    assert "other-keyshard-DLQ" in str(run.error)


def test_another_dead_letter_topic_is_refused_while_dead_letters_rest(
    parking: ParkingTopic, tmp_path: Path
) -> None:
    options = {"checkpoint": f"file://{tmp_path / 'checkpoint.json'}"}
    parking.broken = {"b"}
    parking.publish("b")
    with parking.run(**options):
        wait_until(lambda: len(parking.dead_letters()) == 1 and parking.backlog() == 0)
    with parking.run(dead_letter_topic="elsewhere", **options) as run:
        run.thread.join(deadline(20))
    assert isinstance(run.error, ConfigError)
    assert "letters of parked keys" in str(run.error)
