"""Segments of a scalable topic that worker processes receive, on a real broker of Pulsar 5."""

from __future__ import annotations

import random
import signal
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from keyshard.core.position.checkpoint import Checkpoint
from keyshard.testing.devbroker import DevBroker
from tests.helpers import rows_of, started, wait_until
from tests.integration.test_scalable_topics import END_S, Handled
from tests.integration.test_workers import struck, worker_processes
from tests.support.scalable_topic import ScalableTopic
from tests.support.tested_pulsar import PULSAR

pytestmark = [
    pytest.mark.broker,
    pytest.mark.skipif(int(PULSAR.split(".")[0]) < 5, reason="needs scalable topics"),
]


def test_workers_share_segments_and_each_message_comes_once_in_order(
    dev_broker: DevBroker, tmp_path: Path
) -> None:
    draw, shares = random.Random(11), list[list[int]]()
    with closing(ScalableTopic(dev_broker, segments=4)) as topic:
        handled = Handled(dev_broker, topic, tmp_path)
        topic.publish(100)
        for parallelism, workers in ((4, 2), (7, 3)):
            source = replace(handled.source(parallelism), workers=f"processes:{workers}")
            with source.running(handled.handle, checkpoint=handled.checkpoint) as run:
                window = run.status()["window"]
                assert window is not None
                shares.append([one["consumers"] for one in window["sourceWorkers"]])
                for _ in range(3):
                    topic.publish(100)
                    topic.change(draw)
                topic.publish(100)
                wait_until(lambda: len(handled.got) >= len(topic.sent), END_S)
            assert not worker_processes()
            topic.change(draw)
            topic.publish(100)
        with handled.running(3):
            wait_until(lambda: len(handled.got) >= len(topic.sent), END_S)
        topic.check(handled.got)
        assert shares[0] == [2, 2]
        assert len(shares[1]) == 3


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_dies_loses_and_repeats_nothing_while_segments_split_and_merge(
    dev_broker: DevBroker, tmp_path: Path, how: signal.Signals
) -> None:
    draw = random.Random(12)
    with closing(ScalableTopic(dev_broker, segments=2)) as topic:
        handled = Handled(dev_broker, topic, tmp_path)
        source = replace(handled.source(4), workers="processes:2")
        with (
            source.running(handled.handle, checkpoint=handled.checkpoint),
            struck(3.0 if how is signal.SIGKILL else 8.0, [how]) as hit,
        ):
            while len(hit) < 3 or len(topic.sent) < 1_000:
                topic.publish(200)
                if len(topic.changes) < 8:
                    topic.change(draw)
            wait_until(lambda: len(handled.got) >= len(topic.sent), END_S)
        topic.check(handled.got)


def test_a_bounded_run_with_workers_ends_with_what_was_stored(
    dev_broker: DevBroker, tmp_path: Path
) -> None:
    draw, got = random.Random(13), list[str]()
    with closing(ScalableTopic(dev_broker, segments=2)) as topic:
        topic.keep()
        source = replace(Handled(dev_broker, topic, tmp_path).source(3), workers="processes:2")
        checkpoint: Checkpoint | None = None
        for _ in range(2):
            for _ in range(2):
                topic.publish(100)
                topic.change(draw)
            with started(source.coordinator(), checkpoint, available_now=True) as run:
                while (end := run.batches.cut_available(100)) is not None:
                    rows = rows_of(run, end)
                    got += [str(row["value"], "utf-8") for part in rows.values() for row in part]
                    run.batches.release(end)
                    checkpoint = Checkpoint.from_json(end.to_json())
            topic.check(got)
