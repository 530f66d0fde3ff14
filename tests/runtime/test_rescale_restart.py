"""A restart with a checkpoint goes on with the ranges of the last rescale."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from keyshard import KeyShardSource, Message
from keyshard.broker.memory import MemoryBroker
from keyshard.broker.memory import Message as Stored
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.ring.assignment import Assignment, assign
from keyshard.errors import CheckpointError, NotRunningError
from keyshard.handlers.batches import Batch
from tests.helpers import DEADLINE_S, key_in, wait_until
from tests.support.deadlines import deadline
from tests.support.memory_topic import MemoryTopic
from tests.support.recorded_handler import RecordedHandler, RecordedRun

MakeWorld = Callable[..., RecordedHandler]
Again = Callable[..., RecordedRun]


def handle(message: Message) -> None:
    """Done at once."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tmp_path / "orders.json"


@pytest.fixture
def recorded(checkpoint: Path) -> Iterator[RecordedHandler]:
    made = RecordedHandler(handle, options={"checkpoint": checkpoint})
    yield made
    made.end()
    made.cluster.validate()


@pytest.fixture
def again(recorded: RecordedHandler, checkpoint: Path) -> Iterator[Again]:
    """Start the source again, after its end."""
    made: list[RecordedRun] = []

    def start(**settings: Any) -> RecordedRun:
        (made or [recorded])[-1].end()
        made.append(
            RecordedRun(
                handle,
                lambda: MemoryBroker(recorded.cluster),
                recorded.topic,
                {"checkpoint": checkpoint},
                before=(made or [recorded])[-1],
                **settings,
            )
        )
        return made[-1]

    yield start
    for run in made:
        run.end()


def rescaled(checkpoint: Path) -> Any:
    """Return the last rescale in the stored checkpoint, if there is one."""
    return json.loads(checkpoint.read_text()).get("rescaled") if checkpoint.exists() else None


def owners(run: RecordedRun) -> Assignment:
    """The owners of the ranges, in every topic partition."""
    coordinator = run.source.__dict__["_made"]
    found: Assignment = coordinator.consumers.range_consumers.assignment
    assert coordinator.status()["ranges"] == len(run.source.status()["ranges"]) == len(found)
    for consumers in coordinator.consumers.range_consumers.by_partition.values():
        held = sorted(
            (one.owned_range.range_index, one.owned_range.hash_range) for one in consumers
        )
        assert held == [(at, part) for at, parts in enumerate(found) for part in parts]
    return found


@pytest.mark.simulated
def test_a_restart_keeps_the_number_of_ranges_and_makes_each_contiguous(
    recorded: RecordedHandler, again: Again, checkpoint: Path
) -> None:
    recorded.publish(*(f"k{number}" for number in range(50)))
    wait_until(lambda: recorded.count == 50 and checkpoint.exists())
    assert rescaled(checkpoint) is None
    assert recorded.rescale(7).consumers > 7, "it runs in pieces"
    wait_until(lambda: rescaled(checkpoint) == {"owners": 7, "parallelism": 4})
    run = again()
    assert owners(run) == assign(7)
    recorded.publish(*(f"k{number}" for number in range(50)))
    wait_until(lambda: run.count == 100)
    assert rescaled(checkpoint) == {"owners": 7, "parallelism": 4}, "also after the next commit"
    run.judge(recorded.per_key)


def test_a_restart_keeps_the_number_of_lanes_and_threads(
    recorded: RecordedHandler, checkpoint: Path, again: Again
) -> None:
    recorded.rescale(9)
    wait_until(lambda: rescaled(checkpoint))
    status = again().source.status()
    assert status["workers"] == 9 * status["lanes"]


@pytest.mark.simulated
def test_a_restart_keeps_the_hash_ranges_of_a_balance(
    recorded: RecordedHandler, again: Again, checkpoint: Path
) -> None:
    busy = [key_in(assign(4)[1][0], number) for number in range(30)]
    recorded.publish(*busy * 20)
    wait_until(lambda: recorded.count == 600)
    recorded.rescale(balance=True)
    balanced = owners(recorded)
    assert balanced != assign(4)
    wait_until(lambda: rescaled(checkpoint))
    assert isinstance(rescaled(checkpoint)["owners"], str)
    run = again()
    assert owners(run) == balanced
    run.judge(recorded.per_key)


@pytest.mark.simulated
def test_a_changed_parallelism_overrides_the_last_rescale(
    recorded: RecordedHandler, again: Again, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "keyshard")
    recorded.rescale(7)
    wait_until(lambda: rescaled(checkpoint))
    assert owners(again(parallelism=5)) == assign(5)
    assert "parallelism is 5, but was 4 when the source was rescaled to 7 ranges" in caplog.text
    wait_until(lambda: rescaled(checkpoint) is None)
    assert owners(again(parallelism=4)) == assign(4), "what was passed over does not come back"


def test_a_rescale_back_to_parallelism_is_nothing_to_remember(
    recorded: RecordedHandler, checkpoint: Path, again: Again
) -> None:
    for count in (7, 3, 4):
        recorded.rescale(count)

        def is_stored(count: int = count) -> bool:
            return bool(rescaled(checkpoint)) == (count != 4)

        wait_until(is_stored)
    assert sum(map(len, owners(recorded))) > 4
    assert owners(again()) == assign(4)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.simulated
def test_a_restart_after_a_kill_has_the_ranges_of_the_stored_checkpoint(
    recorded: RecordedHandler, again: Again, checkpoint: Path, stored: bool
) -> None:
    keys = [f"k{number}" for number in range(50)]
    recorded.publish(*keys)
    wait_until(lambda: recorded.count == 50 and recorded.backlog() == 0)
    before = checkpoint.read_bytes()
    recorded.rescale(8)
    recorded.publish(*keys)
    wait_until(lambda: recorded.count == 100 and rescaled(checkpoint))
    at_kill = checkpoint.read_bytes() if stored else before
    recorded.connections[-1].kill()
    recorded.end()
    checkpoint.write_bytes(at_kill)
    run = again()
    assert owners(run) == assign(8 if stored else 4)
    recorded.publish(*keys)
    wait_until(lambda: recorded.backlog() == 0)
    for seqs in run.handled.values():
        assert list(dict.fromkeys(seqs)) == [0, 1, 2]
        assert seqs[-1] == 2


def test_a_damaged_assignment_starts_nothing(recorded: RecordedHandler, checkpoint: Path) -> None:
    recorded.rescale(8)
    wait_until(lambda: rescaled(checkpoint))
    recorded.end()
    good = json.loads(checkpoint.read_text())
    good["rescaled"]["owners"] = "0-9;11-65535"
    checkpoint.write_text(json.dumps(good))
    with pytest.raises(CheckpointError, match=r"orders\.json.*cover the ring once: 10 has none"):
        KeyShardSource("orders", subscription="keyshard", service_url="memory://nowhere").run(
            handle, checkpoint=checkpoint
        )


def test_batches_remember_the_last_rescale_and_open_does_not(checkpoint: Path) -> None:
    made = MemoryTopic()
    cluster, topic, source = made.cluster, made.topic, made.source()

    def iterate() -> list[Batch]:
        return list(source.batches(max_rows=10, max_wait_s=0.02, checkpoint=checkpoint))

    with ThreadPoolExecutor(1) as pool:
        for life in range(2):
            running = pool.submit(iterate)
            wait_until(lambda: state(source) == "running")
            assert len(source.status()["ranges"]) == (4, 6)[life]
            if not life:
                source.rescale(6)
                wait_until(lambda: rescaled(checkpoint) == {"owners": 6, "parallelism": 4})
            source.stop()
            assert running.result(DEADLINE_S) == []
    for number in range(20):
        cluster.publish(topic, Stored(b"", key=f"k{number}"))
    with source.open(checkpoint.read_text()) as stream:
        batch = stream.next_batch(timeout_s=deadline(10))
        assert batch is not None
        assert Checkpoint.from_json(batch.checkpoint).ranges == 4
        assert "rescaled" not in batch.checkpoint


def state(source: KeyShardSource) -> str:
    try:
        return str(source.status()["state"])
    except NotRunningError:
        return "stopped"
