"""A restart with a checkpoint goes on with the ranges of the last rescale."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from handler_world import HandlerWorld, RecordedRun
from helpers import key_in, wait_until
from keyshard import KeyShardSource, Message
from keyshard.broker.memory import MemoryBroker, MemoryCluster
from keyshard.broker.memory import Message as Stored
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.ring.assignment import Assignment, assign
from keyshard.errors import CheckpointError, NotRunningError
from keyshard.handlers.batches import Batch

MakeWorld = Callable[..., HandlerWorld]
Again = Callable[..., RecordedRun]


def handle(message: Message) -> None:
    """Done at once."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tmp_path / "orders.json"


@pytest.fixture
def world(checkpoint: Path) -> Iterator[HandlerWorld]:
    made = HandlerWorld(handle, options={"checkpoint": checkpoint})
    yield made
    made.end()
    made.cluster.validate()


@pytest.fixture
def again(world: HandlerWorld, checkpoint: Path) -> Iterator[Again]:
    """Start the source again, after its end."""
    made: list[RecordedRun] = []

    def start(**settings: Any) -> RecordedRun:
        (made or [world])[-1].end()
        made.append(
            RecordedRun(
                handle,
                lambda: MemoryBroker(world.cluster),
                world.topic,
                {"checkpoint": checkpoint},
                before=(made or [world])[-1],
                **settings,
            )
        )
        return made[-1]

    yield start
    for run in made:
        run.end()


def rescaled(checkpoint: Path) -> Any:
    """What the stored checkpoint says of it."""
    return json.loads(checkpoint.read_text()).get("rescaled") if checkpoint.exists() else None


def owners(run: RecordedRun) -> Assignment:
    """Who owns which ranges, in every topic partition."""
    coordinator = run.source.__dict__["_made"]
    found: Assignment = coordinator.worker.range_consumers.assignment
    assert coordinator.status()["ranges"] == len(run.source.status()["ranges"]) == len(found)
    for consumers in coordinator.worker.range_consumers.by_partition.values():
        held = sorted(
            (one.owned_range.range_index, one.owned_range.hash_range) for one in consumers
        )
        assert held == [(at, part) for at, parts in enumerate(found) for part in parts]
    return found


def test_a_restart_has_as_many_ranges_each_in_one_piece(
    world: HandlerWorld, again: Again, checkpoint: Path
) -> None:
    world.publish(*(f"k{number}" for number in range(50)))
    wait_until(lambda: world.count == 50 and checkpoint.exists())
    assert rescaled(checkpoint) is None
    assert world.rescale(7).consumers > 7, "it runs in pieces"
    wait_until(lambda: rescaled(checkpoint) == {"owners": 7, "parallelism": 4})
    run = again()
    assert owners(run) == assign(7)
    world.publish(*(f"k{number}" for number in range(50)))
    wait_until(lambda: run.count == 100)
    assert rescaled(checkpoint) == {"owners": 7, "parallelism": 4}, "also after the next commit"
    run.judge(world.per_key)


def test_it_has_as_many_lanes_and_threads(
    world: HandlerWorld, checkpoint: Path, again: Again
) -> None:
    world.rescale(9)
    wait_until(lambda: rescaled(checkpoint))
    status = again().source.status()
    assert status["workers"] == 9 * status["lanes"]


def test_the_pieces_of_a_balance_stay(world: HandlerWorld, again: Again, checkpoint: Path) -> None:
    busy = [key_in(assign(4)[1][0], number) for number in range(30)]
    world.publish(*busy * 20)
    wait_until(lambda: world.count == 600)
    world.rescale(balance=True)
    balanced = owners(world)
    assert balanced != assign(4)
    wait_until(lambda: rescaled(checkpoint))
    assert isinstance(rescaled(checkpoint)["owners"], str)
    run = again()
    assert owners(run) == balanced
    run.judge(world.per_key)


def test_another_parallelism_counts_more(
    world: HandlerWorld, again: Again, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "keyshard")
    world.rescale(7)
    wait_until(lambda: rescaled(checkpoint))
    assert owners(again(parallelism=5)) == assign(5)
    assert "parallelism is 5, and was 4 when the source was rescaled to 7 ranges" in caplog.text
    wait_until(lambda: rescaled(checkpoint) is None)
    assert owners(again(parallelism=4)) == assign(4), "what was passed over does not come back"


def test_a_rescale_back_to_parallelism_is_nothing_to_remember(
    world: HandlerWorld, checkpoint: Path, again: Again
) -> None:
    for count in (7, 3, 4):
        world.rescale(count)
        wait_until(lambda count=count: bool(rescaled(checkpoint)) == (count != 4))
    assert sum(map(len, owners(world))) > 4
    assert owners(again()) == assign(4)


@pytest.mark.parametrize("stored", [False, True])
def test_a_kill_before_or_after_the_next_commit(
    world: HandlerWorld, again: Again, checkpoint: Path, stored: bool
) -> None:
    keys = [f"k{number}" for number in range(50)]
    world.publish(*keys)
    wait_until(lambda: world.count == 50 and world.backlog() == 0)
    before = checkpoint.read_bytes()
    world.rescale(8)
    world.publish(*keys)
    wait_until(lambda: world.count == 100 and rescaled(checkpoint))
    at_kill = checkpoint.read_bytes() if stored else before
    world.connections[-1].kill()
    world.end()
    checkpoint.write_bytes(at_kill)
    run = again()
    assert owners(run) == assign(8 if stored else 4)
    world.publish(*keys)
    wait_until(lambda: world.backlog() == 0)
    for seqs in run.handled.values():
        assert list(dict.fromkeys(seqs)) == [0, 1, 2]
        assert seqs[-1] == 2


def test_a_damaged_assignment_starts_nothing(world: HandlerWorld, checkpoint: Path) -> None:
    world.rescale(8)
    wait_until(lambda: rescaled(checkpoint))
    world.end()
    good = json.loads(checkpoint.read_text())
    good["rescaled"]["owners"] = "0-9;11-65535"
    checkpoint.write_text(json.dumps(good))
    with pytest.raises(CheckpointError, match=r"orders\.json.*cover the ring once: 10 has none"):
        KeyShardSource("orders", subscription="keyshard", service_url="memory://nowhere").run(
            handle, checkpoint=checkpoint
        )


def test_batches_remember_too_and_open_does_not(checkpoint: Path) -> None:
    name = f"rescale-restart-{time.monotonic_ns()}"
    cluster = MemoryCluster.named(name)
    topic = cluster.create_topic("orders", partitions=2)
    source = KeyShardSource(topic, subscription="keyshard", parallelism=4, service_url=f"memory://{name}",
                            starting_position="earliest")  # fmt: skip

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
            assert running.result(20) == []
    for number in range(20):
        cluster.publish(topic, Stored(b"", key=f"k{number}"))
    with source.open(checkpoint.read_text()) as stream:
        batch = stream.next_batch(timeout_s=10)
        assert batch is not None
        assert Checkpoint.from_json(batch.checkpoint).ranges == 4
        assert "rescaled" not in batch.checkpoint


def state(source: KeyShardSource) -> str:
    try:
        return str(source.status()["state"])
    except NotRunningError:
        return "stopped"
