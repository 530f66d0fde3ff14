"""``memory://name``: the standalone runtime on an in-memory cluster of the process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from keyshard import KeyShardSource
from keyshard.broker.memory import MemoryCluster, Message
from keyshard.core.position.entry import TopicPartition
from keyshard.errors import ConfigError, TopicNotFoundError
from tests.helpers import wait_until
from tests.support.deadlines import deadline

PAGE = Path(__file__).parents[2] / "docs" / "handlers.md"


def values(batch: Any) -> list[int]:
    return [int(value) for rows in batch for value in rows["value"].to_pylist()]


EXAMPLES = re.findall(
    r"```python\n(from keyshard[^`]*def test_.*?)```", PAGE.read_text(), re.DOTALL
)


def test_the_documentation_page_has_examples() -> None:
    assert len(EXAMPLES) == 2


@pytest.mark.parametrize("code", EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_of_the_documentation_page_holds(code: str) -> None:
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)  # noqa: S102 - it is our own
    (test,) = [found for name, found in names.items() if name.startswith("test_")]
    test()


@pytest.mark.parametrize("admin", [True, False])
def test_a_source_runs_on_the_cluster_of_that_name(admin: bool) -> None:
    url = f"memory://source-{admin}"
    cluster = MemoryCluster.named(url.removeprefix("memory://"))
    topic = cluster.create_topic("orders")
    cluster.publish(topic, *(Message(b"%d" % number, key=str(number)) for number in range(20)))
    source = KeyShardSource(
        topic,
        subscription="s",
        parallelism=3,
        starting_position="earliest",
        service_url=url,
        admin_url=url if admin else None,
    )
    with source.open() as stream:
        batch = stream.next_batch(timeout_s=deadline(10))
        assert batch is not None
        found = values(batch)
        stream.commit(batch)
        while len(found) < 20:
            batch = stream.next_batch(timeout_s=deadline(10))
            assert batch is not None
            found += values(batch)
            stream.commit(batch)
        assert batch.end.cluster == (f"source-{admin}" if admin else "")
        wait_until(lambda: cluster.backlog(TopicPartition(topic), "s") == 0)
    assert sorted(found) == list(range(20))
    assert MemoryCluster.named(f"source-{admin}") is cluster
    assert MemoryCluster.named("another").topics() == {}


def test_a_stream_commits_no_batch_of_another() -> None:
    """Two streams read the same topic; the wrong one is given the batch."""
    url = "memory://two-streams"
    cluster = MemoryCluster.named("two-streams")
    topic = cluster.create_topic("orders")
    cluster.publish(topic, Message(b"0", key="k"))
    sources = [
        KeyShardSource(
            topic, subscription=name, parallelism=1, starting_position="earliest", service_url=url
        )
        for name in ("a", "b")
    ]
    with sources[0].open() as first, sources[1].open() as second:
        batch = first.next_batch(timeout_s=deadline(10))
        assert batch is not None
        for wrong in (batch, None, batch.checkpoint):
            with pytest.raises(ConfigError, match="no batch of this stream"):
                second.commit(wrong)  # type: ignore[arg-type]
        assert second.next_batch(timeout_s=deadline(10)) is not None
        first.commit(batch)
        wait_until(lambda: cluster.backlog(TopicPartition(topic), "a") == 0)
    assert cluster.backlog(TopicPartition(topic), "b") == 1


def test_with_its_admin_interface_a_missing_topic_is_refused_and_a_pattern_found() -> None:
    url = "memory://pattern"
    cluster = MemoryCluster.named("pattern")
    with pytest.raises(TopicNotFoundError):
        KeyShardSource("none", subscription="s", service_url=url, admin_url=url).open()
    assert cluster.topics() == {}
    topic = cluster.create_topic("orders-1", partitions=2)
    cluster.publish(topic, Message(b"1", key="k"))
    source = KeyShardSource(
        topics_pattern="persistent://public/default/orders-.*",
        subscription="s",
        starting_position="earliest",
        service_url=url,
        admin_url=url,
    )
    with source.open() as stream:
        batch = stream.next_batch(timeout_s=deadline(10))
        assert batch is not None
        assert values(batch) == [1]
