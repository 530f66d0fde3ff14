"""Deaths of actors and of the driver, and signals, with a checkpoint and on a real broker."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.history import Event, read_history
from tests.helpers import present, wait_until
from tests.ray.kills import ROOT, Kills
from tests.support.deadlines import deadline

pytestmark = [pytest.mark.ray, pytest.mark.broker]


def test_nothing_in_the_checkpoint_comes_again_and_the_order_stays(
    dev_broker: DevBroker, tmp_path: Path
) -> None:
    kills = Kills(dev_broker, tmp_path, messages=6_000, deadline_s=deadline(150))
    kills.run(driver_kills=1, actor_kills=2)
    assert kills.broken() == []
    assert len(kills.durable) == 1
    assert kills.actors_killed == 2


def test_a_signal_drains_so_that_nothing_handled_is_left_out_of_the_checkpoint(
    dev_broker: DevBroker, tmp_path: Path
) -> None:
    kills = Kills(dev_broker, tmp_path, messages=4_000, deadline_s=deadline(150))
    kills.writer.close()

    def completed() -> list[Event]:
        events = read_history(kills.history, torn_end=True)
        return [event for event in events if event.kind == "completed"]

    driver = kills.start(2, "--wait")
    wait_until(lambda: driver.poll() is not None or len(completed()) >= 1_000, deadline(120))
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(deadline(60)) == 0, (tmp_path / "driver.txt").read_text()
    checkpoint = Checkpoint.from_json(kills.checkpoint.read_text())

    def is_covered(event: Event) -> bool:
        where = TopicPartition(present(event.topic), present(event.partition))
        entry_id = EntryId(present(event.ledger), present(event.entry))
        return checkpoint.partitions[where].covers(entry_id)

    left = [event for event in completed() if not is_covered(event)]
    assert not left


def test_the_death_of_a_node_loses_no_message_and_keeps_the_order(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.ray.node_death", str(tmp_path)],
        cwd=ROOT, check=False, timeout=deadline(170), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
