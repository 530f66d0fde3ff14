"""Topics that the broker reports, so that a source need not wait for its next round."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from keyshard.broker.topics import Catalog
from keyshard.config.source import SourceConfig
from keyshard.coordinator import discovery, topic_watches
from keyshard.coordinator.coordinator import Coordinator
from keyshard.coordinator.topic_watches import TopicWatches
from keyshard.errors import BrokerUnavailableError
from tests.helpers import wait_until
from tests.support.changing_topics import ChangingTopics


@pytest.fixture
def changing(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChangingTopics]:
    monkeypatch.setattr(discovery, "SETTLE_S", 0.01)
    monkeypatch.setattr(discovery, "AGAIN_S", 0.05)
    topics = ChangingTopics(reports_topics=True)
    yield topics
    topics.cluster.validate()


def partitions(coordinator: Coordinator) -> int:
    return coordinator.status()["topicPartitions"]


@pytest.mark.parametrize("by_pattern", [True, False])
def test_topics_that_come_grow_and_go_are_found_without_waiting_for_the_interval(
    changing: ChangingTopics, by_pattern: bool
) -> None:
    changing.cluster.create_topic("a-1", 2)
    source: SourceConfig
    if by_pattern:
        source = changing.matching("a-.*")
    else:
        changing.cluster.create_topic("b", 1)
        source = changing.source(["a-1", "b"], admin_url="http://memory")
    with changing.running(source) as coordinator:
        before = partitions(coordinator)
        topic = changing.cluster.create_topic("a-2", 0)
        changing.cluster.grow_topic("persistent://public/default/a-1", 5)
        wait_until(lambda: partitions(coordinator) == before + 3 + by_pattern)
        changing.publish("a-1", 4)
        wait_until(lambda: coordinator.status()["rowsReceived"] == 20)
        if by_pattern:
            changing.cluster.delete_topic(topic)
            wait_until(lambda: partitions(coordinator) == before + 3)
            wait_until(lambda: changing.names() == {"a-1"})


def test_a_watch_that_was_lost_is_opened_again(
    changing: ChangingTopics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_watches, "AGAIN_S", 0.0)
    changing.cluster.create_topic("a-1")
    source = changing.matching("a-.*", discovery_interval_ms=20)
    with changing.running(source) as coordinator:
        wait_until(lambda: changing.cluster._watches)
        (first,) = changing.cluster._watches
        changing.cluster.crash()
        assert not first.is_open
        wait_until(lambda: any(watch.is_open for watch in changing.cluster._watches))
        changing.cluster.create_topic("a-2")
        wait_until(lambda: partitions(coordinator) == 2)


class Refusing:
    """A catalog whose broker refuses a watch, or has none."""

    def __init__(self, answers: Iterator[Exception | None]) -> None:
        self.asked = 0
        self._answers = answers

    def prefixes(self) -> tuple[str, ...]:
        return ("persistent://public/default/a",)

    def watch(self, _prefix: str, _changed: Callable[[], None]) -> None:
        self.asked += 1
        if (error := next(self._answers)) is not None:
            raise error


def test_a_broker_that_reports_nothing_is_seldom_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = Refusing(iter([BrokerUnavailableError("away"), None, None]))
    watches = TopicWatches(catalog, pytest.fail)  # type: ignore[arg-type]
    for _ in range(100):
        watches.open()
    assert catalog.asked == 1
    watches._again_s.clear()
    for _ in range(100):
        watches.open()
    assert catalog.asked == 2
    watches.close()


def test_topics_of_others_are_not_looked_at(
    changing: ChangingTopics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "AGAIN_S", 60.0)
    rounds: list[None] = []
    topics = Catalog.topics

    def counted(catalog: Catalog) -> tuple[str, ...]:
        rounds.append(None)
        return topics(catalog)

    changing.cluster.create_topic("a-1", 2)
    with changing.running(changing.matching("a-.*")) as coordinator:
        monkeypatch.setattr(Catalog, "topics", counted)
        for number in range(50):
            changing.cluster.create_topic(f"b-{number}")
        changing.cluster.create_topic("a-2")
        wait_until(lambda: partitions(coordinator) == 3)
        assert len(rounds) <= 2, "of the start, and of the report"
