"""Runs that publish and die at a drawn step, again and again: each output is stored once, in order.

From the step on, nothing of the run reaches a disk or the broker, as after a kill. With
``KEYSHARD_TEST_SEEDS=300`` more is drawn.
"""

from __future__ import annotations

import os
import random
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keyshard import Message, Produce, Reject
from keyshard.broker.memory import Batching, MemoryEntryProducer
from keyshard.broker.memory import Message as Stored
from keyshard.errors import KeyShardError
from keyshard.handlers.checkpoint_store import CheckpointStore
from keyshard.handlers.entry_run import Committer
from tests.helpers import DEADLINE_S, wait_until
from tests.support.copied_topic import Copied
from tests.support.handled_topic import AT_ONCE

pytestmark = pytest.mark.simulated(seeds=1)

SEEDS = int(os.environ.get("KEYSHARD_TEST_SEEDS", "8"))
RUNS_MAX = 40


class DiedError(KeyShardError):
    """The run is dead."""


class Death:
    """Lets a run die at one of its steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._lock = threading.Lock()
        self.left = 0
        """Steps until it dies; negative: it lives."""
        self.dead = False
        for owner, name, after in (
            (CheckpointStore, "save", True),
            (MemoryEntryProducer, "publish", False),
            (Committer, "release", False),
        ):
            monkeypatch.setattr(owner, name, self._mortal(getattr(owner, name), after=after))

    def begin(self, steps: int) -> None:
        self.left, self.dead = steps, False

    def _mortal(self, function: Callable[..., Any], *, after: bool) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            self._step()
            result = function(*args, **named)
            if after:
                self._step()
            return result

        return call

    def _step(self) -> None:
        with self._lock:
            self.left -= 1
            self.dead = self.dead or not self.left
            if self.dead:
                raise DiedError("it is dead")


def rejected(value: bytes) -> bool:
    return zlib.crc32(value) % 37 == 0


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_run_that_dies_again_and_again_publishes_each_output_once(
    copied: Copied, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    draw = random.Random(seed)
    copied.cluster.deduplicate(copied.out)
    batching = draw.choice(list(Batching))
    parallelism = 1 if batching is Batching.MIXED else draw.randint(1, 4)
    numbers = dict.fromkeys((f"key-{k}" for k in range(draw.randint(1, 12))), 0)
    death, failed = Death(monkeypatch), set[bytes]()

    def publish(count: int) -> None:
        messages = []
        for _ in range(count):
            key = draw.choice(list(numbers))
            messages.append(Stored(f"{key}:{numbers[key]}".encode(), key=key))
            numbers[key] += 1
        copied.cluster.publish(copied.topic, *messages, batching=batching)

    def handle(message: Message) -> Iterator[Produce]:
        value = message.value or b""
        yield Produce(value, key=message.key)
        if rejected(value):
            raise Reject
        if zlib.crc32(value) % 5 == 0 and value not in failed:
            failed.add(value)
            raise ValueError("at first")
        yield Produce(value + b"!", key=message.key)

    options = {
        "sink": copied.sink, "checkpoint": tmp_path / "checkpoint.json", "retry": AT_ONCE,
        "on_failure": "dead_letter", "lanes": draw.randint(1, 4), "drain_timeout_s": 0.1,
    }  # fmt: skip
    deaths = 0
    for _ in range(RUNS_MAX):
        publish(draw.randint(1, 60))
        death.begin(draw.randint(1, 12))
        with copied.running(copied.source(parallelism=parallelism), handle, **options) as run:
            wait_until(lambda: death.dead or copied.backlog() == 0)
            if death.dead:
                run.thread.join(DEADLINE_S)
        assert all(isinstance(error, DiedError) for error in copied.errors), copied.errors
        deaths += death.dead
        if deaths >= 6:
            break
    copied.errors.clear()
    death.begin(-1)
    with copied.running(copied.source(parallelism=parallelism), handle, **options):
        wait_until(lambda: copied.backlog() == 0)
    assert not copied.errors
    assert deaths
    expected = {
        key: [
            output
            for value in (f"{key}:{number}".encode() for number in range(count))
            if not rejected(value)
            for output in (value, value + b"!")
        ]
        for key, count in numbers.items()
    }
    assert copied.by_key() == {key: values for key, values in expected.items() if values}
