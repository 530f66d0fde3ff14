"""Values as notebooks show them: escaped, short and without secrets."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

import pytest

from keyshard import Checkpoint, Connection, KeyShardSource, Message, Token
from keyshard.broker.memory import MemoryCluster
from keyshard.broker.memory import Message as Stored
from keyshard.core.position.checkpoint import PartitionCheckpoint
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.notebook import CELL_MAX, ROWS_MAX, table
from keyshard.observe.status_table import ShownStatus
from tests.helpers import wait_until
from tests.support.statuses import partition_status, range_status, status

pytestmark = pytest.mark.usefixtures("control_folder")

HOSTILE = "<img src=x onerror=alert(1)>"
TAGS = {"table", "caption", "thead", "tbody", "tr", "th", "td"}


class Cells(HTMLParser):
    """The tags and the texts of a document."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.feed(document)
        assert set(self.tags) <= TAGS, "the document has tables only"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert {name for name, _ in attrs} <= {"colspan"}
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def shown(value: Any) -> list[str]:
    return Cells(value._repr_html_()).texts


def test_cells_are_escaped_cut_and_counted() -> None:
    cells = Cells(table(HOSTILE, [(HOSTILE, "x" * 2 * CELL_MAX)] * (ROWS_MAX + 5))).texts
    assert cells[:3] == [HOSTILE, HOSTILE, f"{'x' * CELL_MAX}..."]
    assert cells[-1] == "... and 5 more"
    assert len(cells) == 1 + 2 * ROWS_MAX + 1
    assert Cells(table("t", [], ("a", "b"))).texts == ["t", "a", "b"]
    assert Cells(table("t", [(1, 4_000, None)], ("a", "b", "c"))).texts[-3:] == ["1", "4,000", "-"]


def test_a_source_shows_its_options_without_secrets() -> None:
    connection = Connection("pulsar+ssl://h:1", authentication=Token("very-secret-token"))
    source = KeyShardSource(
        "orders", subscription=HOSTILE, connection=connection, ui_token="0123456789abcdef-page"
    )
    texts = shown(source)
    assert texts[0] == "KeyShardSource"
    assert repr(HOSTILE) in texts
    assert "very-secret" not in "".join(texts)
    assert "0123456789abcdef" not in "".join(texts)


def test_a_status_shows_trouble_first() -> None:
    ranges = [range_status(index) for index in range(100)]
    ranges[70] = range_status(70, state="stalled", reason=HOSTILE)
    texts = shown(
        ShownStatus(
            status(
                name=HOSTILE,
                ranges=ranges,
                partitions=[
                    partition_status(0),
                    partition_status(1, covered=False),
                    partition_status(2, stalled={"reason": "the broker reads nothing"}),
                ],
                newestError={"error": HOSTILE, "secondsAgo": 1.0},
            )
        )
    )
    assert texts.index("stalled") < texts.index("idle")
    assert "... and 80 more" in texts
    assert texts.count(HOSTILE) == 2
    assert "slots without a consumer" in texts
    assert "the broker reads nothing" in texts


def test_a_running_source_and_its_rescale_are_shown() -> None:
    cluster = MemoryCluster.named("notebooks")
    topic = cluster.create_topic("orders", partitions=2)
    cluster.publish(topic, Stored(b"1", key="a"))
    handled: list[Message] = []
    source = KeyShardSource(
        topic, subscription="jobs", parallelism=2, service_url="memory://notebooks",
        starting_position="earliest",
    )  # fmt: skip
    with source.running(handled.append):
        wait_until(lambda: handled)
        report = shown(source.rescale(4))
        assert {"Rescale", "2 to 4", "50.0% of the ring"} <= set(report)
        assert {"Balance", "4 to 4"} <= set(shown(source.rescale(balance=True)))
        running = source.status()
        assert "jobs: status" in shown(running)
        assert json.loads(json.dumps(running)) == running


def test_a_checkpoint_shows_its_positions() -> None:
    delivered = EntrySet.of([EntryId(3, 5), EntryId(3, 6), EntryId(3, 9)])
    state = PartitionCheckpoint(EntryId(3, 2), delivered, EntrySet.of([EntryId(3, 9)]))
    many = {TopicPartition("persistent://public/default/t", n): state for n in range(50)}
    texts = shown(Checkpoint("c", HOSTILE, 4, many))
    assert HOSTILE in texts[0]
    assert texts[6:11] == ["persistent://public/default/t-partition-0", "3:2", "3", "2", "1"]
    assert texts[-1] == "... and 30 more"
