"""Handlers that publish with a checkpoint: each output is stored once."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from tenacity import stop_never, wait_fixed

from keyshard import Checkpoint, Connection, KeyShardSink, Message, Produce, Reject, RetryPolicy
from keyshard.broker.memory import Batching
from keyshard.broker.memory import Message as Stored
from keyshard.core.position.outputs import Outputs
from keyshard.errors import (
    CheckpointError,
    CheckpointMismatchError,
    ConfigError,
    DeduplicationError,
    KeyShardError,
    ProducerBusyError,
)
from keyshard.handlers.checkpoint_store import CheckpointStore
from keyshard.handlers.output_log import OutputLog
from tests.helpers import DEADLINE_S, present, wait_until
from tests.support.copied_topic import Copied
from tests.support.deadlines import deadline
from tests.support.handled_topic import AT_ONCE
from tests.support.process_handlers import copy


@pytest.fixture
def once(copied: Copied) -> Copied:
    copied.cluster.deduplicate(copied.out)
    return copied


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint.json"


def twice(keys: int, per_key: int) -> dict[str | None, list[bytes | None]]:
    return {f"key-{k}": [b"%d" % n for n in range(per_key) for _ in "ab"] for k in range(keys)}


async def copy_async(message: Message) -> AsyncIterator[Produce]:
    for one in copy(message):
        await asyncio.sleep(0)
        yield one


@pytest.mark.parametrize("mode", ["threads", "async", "processes"])
def test_every_output_is_stored_once_in_key_order_and_then_acknowledged(
    once: Copied, path: Path, mode: str
) -> None:
    once.publish(keys=7, per_key=50)
    handle = copy_async if mode == "async" else copy
    options = {"sink": once.sink, "checkpoint": path, "executor": mode, "workers": 2}
    with once.running(once.source(), handle, **options) as run:
        wait_until(lambda: once.backlog() == 0)
        counters = run.source.status()["counters"]
        outputs = run.source.status()["outputs"]
    assert not once.errors
    assert once.by_key() == twice(7, 50)
    assert counters["outputsPublished"] == counters["outputsConfirmed"] == 700
    assert outputs is not None
    assert outputs["guarantee"] == "exactly once"
    stored = json.loads(path.read_text())
    assert stored["version"] == 2
    assert stored["outputs"]["topics"] == {}


def test_outputs_are_published_after_the_checkpoint_and_acknowledged_after_confirmation(
    once: Copied, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once.publish(keys=5, per_key=3)
    save, may_save, saving = CheckpointStore.save, threading.Event(), threading.Event()

    def saved(self: CheckpointStore, checkpoint: Any) -> int:
        saving.set()
        assert may_save.wait(DEADLINE_S)
        return save(self, checkpoint)

    monkeypatch.setattr(CheckpointStore, "save", saved)
    once.hold()
    with once.running(once.source(), copy, sink=once.sink, checkpoint=path) as run:
        assert saving.wait(DEADLINE_S)
        assert run.source.status()["counters"]["outputsPublished"] == 0
        may_save.set()
        wait_until(lambda: present(run.source.status()["counters"]["outputsPublished"]) > 0)
        assert once.backlog() == 15
        once.release()
        wait_until(lambda: once.backlog() == 0)
    assert once.by_key() == twice(5, 3)


def ended_at(step: str, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let a run end at a step of its second batch, as a kill would."""
    reached = threading.Event()
    counts = {"begin": 0}
    original: Callable[..., Any] = getattr(
        CheckpointStore if step in {"before save", "after save"} else OutputLog,
        "save" if step in {"before save", "after save"} else "publish",
    )

    def ends(self: Any, *args: Any) -> Any:
        counts["begin"] += 1
        if counts["begin"] < 3 or reached.is_set():
            return original(self, *args)
        if step in {"after save", "after publish"}:
            original(self, *args)
        reached.set()
        raise KeyShardError(f"ended {step}")

    owner = CheckpointStore if "save" in step else OutputLog
    monkeypatch.setattr(owner, "save" if "save" in step else "publish", ends)
    return reached


@pytest.mark.parametrize("step", ["before save", "after save", "before publish", "after publish"])
def test_a_run_that_ends_at_any_step_is_continued_without_loss_or_duplicate(
    once: Copied, path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    once.publish(keys=9, per_key=60)
    reached = ended_at(step, monkeypatch)
    options = {"sink": once.sink, "checkpoint": path, "lanes": 2}
    with once.running(once.source(), copy, **options) as run:
        run.thread.join(DEADLINE_S)
    assert reached.is_set()
    assert [getattr(error, "message", error) for error in once.errors] == [f"ended {step}"]
    once.errors.clear()
    with once.running(once.source(), copy, **options):
        wait_until(lambda: once.backlog() == 0)
    assert not once.errors
    assert once.by_key() == twice(9, 60)


def killed_while_it_publishes(
    once: Copied, path: Path, monkeypatch: pytest.MonkeyPatch, sink: KeyShardSink
) -> Outputs:
    """Store all outputs, and leave the last batch in the checkpoint."""
    once.publish(keys=9, per_key=60)
    publish, killed = OutputLog.publish, [""]

    def published(log: OutputLog) -> None:
        if log.unconfirmed:
            killed[0] = path.read_text()
        publish(log)

    monkeypatch.setattr(OutputLog, "publish", published)
    with once.running(once.source(), copy, sink=sink, checkpoint=path):
        wait_until(lambda: once.backlog() == 0)
    outputs = Checkpoint.from_json(killed[0]).outputs
    assert outputs is not None
    assert outputs.topics, "a process that is killed while it publishes leaves the batch"
    path.write_text(killed[0])
    return outputs


@pytest.mark.parametrize("scheme", ["java", "murmur3"])
@pytest.mark.simulated
def test_outputs_of_an_unfinished_batch_keep_their_hashing_scheme(
    once: Copied, path: Path, monkeypatch: pytest.MonkeyPatch, scheme: Literal["java", "murmur3"]
) -> None:
    """The sink has another one after the restart."""
    sink = replace(once.sink, hashing_scheme=scheme)
    killed_while_it_publishes(once, path, monkeypatch, sink)
    other: Literal["java", "murmur3"] = "java" if scheme == "murmur3" else "murmur3"
    options = {"sink": replace(sink, hashing_scheme=other), "checkpoint": path}
    with once.running(once.source(), copy, **options) as run:
        run.wait_started()
    assert not once.errors
    assert once.by_key() == twice(9, 60)


@pytest.mark.simulated
def test_outputs_of_a_name_that_the_broker_forgot_are_found_and_stored_once(
    once: Copied, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = killed_while_it_publishes(once, path, monkeypatch, once.sink)
    for where in once.cluster.partitions(once.out):
        once.cluster.forget_producer(where, f"copies-{outputs.run_id}")
    with once.running(once.source(), copy, sink=once.sink, checkpoint=path) as run:
        run.wait_started()
    assert not once.errors
    assert once.by_key() == twice(9, 60)


@pytest.mark.simulated
def test_handled_messages_of_an_unfinished_entry_are_not_handled_again(
    once: Copied, path: Path
) -> None:
    stored = [Stored(b"%d" % n, key=f"key-{n}") for n in range(6)]
    once.cluster.publish(once.topic, *stored, batching=Batching.MIXED)
    handled: list[bytes] = []
    release = threading.Event()

    def handle(message: Message) -> Produce:
        if message.key == "key-3":
            assert release.wait(DEADLINE_S)
        handled.append(message.value or b"")
        return Produce(message.value, key=message.key)

    options = {"sink": once.sink, "checkpoint": path}
    with once.running(once.source(parallelism=1), handle, **options, drain_timeout_s=0.2) as run:
        run.wait_started()
        wait_until(lambda: len(once.stored()) == 5)
        assert once.backlog() > 0
    release.set()
    wait_until(lambda: len(handled) == 6)
    with once.running(once.source(parallelism=1), handle, **options):
        wait_until(lambda: once.backlog() == 0)
    assert handled.count(b"3") == 2
    assert sorted(handled) == sorted([*(b"%d" % n for n in range(6)), b"3"])
    assert once.by_key() == {f"key-{n}": [b"%d" % n] for n in range(6)}


def test_a_restart_rejects_no_message_again_after_newer_ones_of_its_key(
    once: Copied, path: Path
) -> None:
    once.cluster.publish(
        once.topic, Stored(b"1", key="a"), Stored(b"1", key="b"), batching=Batching.MIXED
    )
    once.cluster.publish(once.topic, Stored(b"2", key="a"))
    got: list[tuple[str | None, bytes | None]] = []
    fails = True

    def handle(message: Message) -> Produce:
        if message.key == "b" and fails:
            raise ValueError("not yet")
        got.append((message.key, message.value))
        if (message.key, message.value) == ("a", b"1"):
            raise Reject("bad")
        return Produce(message.value, key=message.key)

    never = RetryPolicy(wait=wait_fixed(3_600), stop=stop_never)
    options = {"sink": once.sink, "checkpoint": path, "retry": never}
    with once.running(once.source(parallelism=1), handle, **options, drain_timeout_s=0.2) as run:
        run.wait_started()
        wait_until(lambda: got == [("a", b"1"), ("a", b"2")])
    fails = False
    with once.running(once.source(parallelism=1), handle, **options):
        wait_until(lambda: once.backlog() == 0)
    assert got == [("a", b"1"), ("a", b"2"), ("b", b"1")]


@pytest.mark.simulated
def test_a_stop_before_the_confirmation_leaves_the_batch_to_the_next_start(
    once: Copied, path: Path
) -> None:
    once.publish(keys=5, per_key=4)
    once.hold()
    options = {"sink": once.sink, "checkpoint": path}
    with once.running(once.source(), copy, **options, drain_timeout_s=0.2) as run:
        run.wait_started()
        wait_until(lambda: present(run.source.status()["counters"]["outputsPublished"]) > 0)
    assert once.backlog() == 20
    once.release()
    with once.running(once.source(), copy, **options):
        wait_until(lambda: once.backlog() == 0)
    assert once.by_key() == twice(5, 4)
    assert not once.errors


@pytest.mark.simulated
def test_a_start_publishes_the_batch_of_its_checkpoint_that_was_never_sent(
    once: Copied, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once.publish(keys=5, per_key=4)
    options = {"sink": once.sink, "checkpoint": path}
    with monkeypatch.context() as patched:
        patched.setattr(OutputLog, "publish", lambda _: None)
        with once.running(once.source(), copy, **options, drain_timeout_s=0.2) as run:
            run.wait_started()
            wait_until(lambda: path.exists() and '"topics"' in path.read_text())
    assert once.backlog() == 20
    assert not once.by_key()
    with once.running(once.source(), copy, **options):
        wait_until(lambda: once.backlog() == 0)
    assert once.by_key() == twice(5, 4)
    assert not once.errors


@pytest.mark.simulated
def test_a_start_that_waits_for_outputs_of_its_checkpoint_can_be_stopped(
    once: Copied, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once.publish(keys=2, per_key=2)
    once.hold()
    sink = replace(once.sink, send_timeout_ms=120_000)
    options = {"sink": sink, "checkpoint": path, "drain_timeout_s": 0.2}
    with once.running(once.source(), copy, **options) as run:
        run.wait_started()
        wait_until(lambda: present(run.source.status()["counters"]["outputsPublished"]) > 0)
    publish, publishing = OutputLog.publish, threading.Event()

    def published(log: OutputLog) -> None:
        publishing.set()
        publish(log)

    monkeypatch.setattr(OutputLog, "publish", published)
    with once.running(once.source(), copy, **options) as run:
        assert publishing.wait(DEADLINE_S)
        assert run.source.status()["state"] == "starting"
        began_s = time.monotonic()
    assert time.monotonic() - began_s < deadline(10)
    assert not once.errors
    once.release()
    with once.running(once.source(), copy, **options):
        wait_until(lambda: once.backlog() == 0)
    assert once.by_key() == twice(2, 2)


def test_more_topics_than_a_run_may_open_fail_their_messages(
    once: Copied, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keyshard.handlers.output_log.TOPICS_MAX", 3)
    once.publish(keys=6, per_key=1)
    for k in range(6):
        once.cluster.deduplicate(once.cluster.create_topic(f"to-key-{k}", 0))
    options: dict[str, Any] = {"retry": AT_ONCE, "on_failure": "dead_letter", "checkpoint": path}

    def handle(message: Message) -> Produce:
        return Produce(message.value, key=message.key, topic=f"to-{message.key}")

    with once.running(once.source(), handle, sink=once.sink, **options):
        wait_until(lambda: once.backlog() == 0)
    dead = once.stored("persistent://public/default/orders-keyshard-DLQ")
    assert len(dead) == 4
    assert all("3 topics already" in str(one.properties) for one in dead)


@pytest.mark.simulated(seeds=1)
def test_a_stalled_topic_holds_back_input_and_is_named(
    once: Copied, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keyshard.handlers.logged_outputs.BYTES_MAX", 2_000)
    once.publish(keys=40, per_key=12)
    once.hold()
    sink = replace(once.sink, send_timeout_ms=300)
    with once.running(once.source(), copy, sink=sink, checkpoint=path) as run:
        run.wait_started()
        wait_until(lambda: "not confirmed" in str(run.source.status()["outputs"]))
        wait_until(
            lambda: any(
                each["stalled"] is not None
                and "outputs wait for the broker" in each["stalled"]["reason"]
                for each in run.source.status()["ranges"]
            ),
            deadline(20),
        )
        assert present(run.source.status()["counters"]["completed"]) < 200
        assert once.backlog() == 480
        once.release()
        wait_until(lambda: once.backlog() == 0)
        assert present(run.source.status()["counters"]["outputsFailed"]) > 0
    assert once.by_key() == twice(40, 12)


@pytest.mark.simulated
def test_a_refused_output_becomes_a_dead_letter_and_others_go_on(once: Copied, path: Path) -> None:
    once.publish(keys=4, per_key=3)

    def handle(message: Message) -> list[Produce]:
        large = message.key == "key-0" and message.value == b"1"
        return [Produce(b"x" * 6_000_000 if large else message.value, key=message.key)]

    options: dict[str, Any] = {"retry": AT_ONCE, "on_failure": "dead_letter", "checkpoint": path}
    with once.running(once.source(), handle, sink=once.sink, **options):
        wait_until(lambda: once.backlog() == 0)
    (dead,) = once.stored("persistent://public/default/orders-keyshard-DLQ")
    assert dead.value == b"1"
    assert "MessageTooLargeError" in str(dead.properties)
    assert once.by_key()["key-0"] == [b"0", b"2"]


@pytest.mark.simulated
def test_outputs_of_replayed_dead_letters_are_published(once: Copied, path: Path) -> None:
    once.publish(keys=2, per_key=3)
    fails = threading.Event()
    fails.set()

    def handle(message: Message) -> Produce:
        if message.key == "key-0" and fails.is_set():
            raise ValueError("not yet")
        return Produce(message.value, key=message.key)

    options: dict[str, Any] = {"retry": AT_ONCE, "sink": once.sink, "checkpoint": path}
    with once.running(once.source(), handle, **options) as run:
        wait_until(lambda: once.backlog() == 0)
        assert run.source.status()["parkedKeys"] == 1
        fails.clear()
        run.source.unpark("key-0")
        wait_until(lambda: run.source.status()["parkedKeys"] == 0)
    assert once.by_key() == {f"key-{k}": [b"0", b"1", b"2"] for k in range(2)}


@pytest.mark.simulated
def test_outputs_go_to_several_topics_once(once: Copied, path: Path) -> None:
    other = once.cluster.create_topic("other", 0)
    once.cluster.deduplicate(other)
    once.publish(keys=3, per_key=4)

    def handle(message: Message) -> list[Produce]:
        return [
            Produce(message.value, key=message.key),
            Produce(message.value, key=message.key, topic="other"),
        ]

    with once.running(once.source(), handle, sink=once.sink, checkpoint=path):
        wait_until(lambda: once.backlog() == 0)
    expected = {f"key-{k}": [b"%d" % n for n in range(4)] for k in range(3)}
    assert once.by_key() == once.by_key(other) == expected


def test_a_topic_without_deduplication_is_refused_at_the_start(copied: Copied, path: Path) -> None:
    copied.publish(keys=1, per_key=1)
    with pytest.raises(DeduplicationError, match="set-deduplication"):
        copied.source().run(copy, sink=copied.sink, checkpoint=path)
    assert copied.stored() == []
    assert not path.exists()


@pytest.mark.simulated
def test_a_checkpoint_needs_a_sink_id_and_the_sink_of_its_outputs(once: Copied, path: Path) -> None:
    nameless = KeyShardSink(once.out, service_url=once.url)
    with pytest.raises(ConfigError, match="sink_id"):
        once.source().run(copy, sink=nameless, checkpoint=path)
    once.publish(keys=1, per_key=1)
    with once.running(once.source(), copy, sink=once.sink, checkpoint=path):
        wait_until(lambda: once.backlog() == 0)
    with pytest.raises(
        CheckpointMismatchError, match="'copies', but the source starts with sink_id 'x'"
    ):
        once.source().run(copy, sink=replace(once.sink, sink_id="x"), checkpoint=path)
    with pytest.raises(CheckpointMismatchError, match="starts without a sink"):
        once.source().run(lambda _: None, checkpoint=path)
    with pytest.raises(CheckpointMismatchError, match="starts without a sink"):
        once.source().open(path.read_text())
    with pytest.raises(CheckpointMismatchError, match="starts without a sink"):
        next(once.source().batches(checkpoint=path))


def test_a_new_checkpoint_is_another_run(once: Copied, path: Path) -> None:
    for name in ("one", "two"):
        once.publish(keys=1, per_key=2)
        with once.running(once.source(), copy, sink=once.sink, checkpoint=path.with_name(name)):
            wait_until(lambda: once.backlog() == 0)
    assert not once.errors
    assert len(once.stored()) == 8


def test_a_second_run_with_the_checkpoint_of_the_first_is_refused(once: Copied, path: Path) -> None:
    once.publish(keys=1, per_key=2)
    with once.running(once.source(), copy, sink=once.sink, checkpoint=path):
        wait_until(lambda: once.backlog() == 0)
        other = path.with_name("copy.json")
        other.write_text(path.read_text())
        connection = Connection(once.url, operation_timeout_ms=1_000)
        sink = replace(once.sink, connection=connection)
        with pytest.raises(ProducerBusyError):
            once.source(subscription="other").run(copy, sink=sink, checkpoint=other)


def test_a_checkpoint_that_fails_during_a_stop_leaves_no_handler_behind(
    once: Copied, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "keyshard.handlers.run")
    once.cluster.publish(once.topic, Stored(b"1", key="a"), Stored(b"1", key="b"))
    begun, returned = threading.Barrier(3), threading.Event()
    stopping, fails = threading.Event(), threading.Event()

    def handle(message: Message) -> Produce:
        begun.wait(DEADLINE_S)
        if message.key == "a":
            assert fails.wait(DEADLINE_S)
            time.sleep(0.2)
            returned.set()
        else:
            assert stopping.wait(DEADLINE_S)
        return Produce(message.value, key=message.key)

    def save(_: CheckpointStore, __: Checkpoint) -> int:
        fails.set()
        raise CheckpointError("No space left on device.")

    monkeypatch.setattr(CheckpointStore, "save", save)
    source = once.source(parallelism=1)
    with once.running(source, handle, sink=once.sink, checkpoint=path) as run:
        run.wait_started()
        begun.wait(DEADLINE_S)
        source.stop()
        wait_until(lambda: "stopping: 2 handlers are running" in caplog.text)
        stopping.set()
    assert returned.is_set(), "the run ended before its handler"
    assert [type(one) for one in once.errors] == [CheckpointError]


@pytest.mark.parametrize("fails", ["save", "publish"])
@pytest.mark.simulated
def test_a_stop_after_a_failed_commit_does_not_wait_for_replayed_dead_letters(
    once: Copied, path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """The lane of a replayed message waits for its outputs, which nothing publishes any more."""
    once.publish(keys=1, per_key=1)
    broken = threading.Event()

    def handle(message: Message) -> Produce:
        if not broken.is_set():
            raise ValueError("not yet")
        return Produce(message.value, key=message.key)

    def fail(*_: object) -> int:
        raise CheckpointError("No space left on device.")

    options: dict[str, Any] = {"retry": AT_ONCE, "sink": once.sink, "checkpoint": path}
    options["drain_timeout_s"] = 2 * DEADLINE_S
    with once.running(once.source(), handle, **options) as run:
        wait_until(lambda: once.backlog() == 0 and run.source.status()["parkedKeys"] == 1)
        owner = CheckpointStore if fails == "save" else OutputLog
        monkeypatch.setattr(owner, fails, fail)
        broken.set()
        run.source.unpark("key-0")
        wait_until(lambda: bool(once.errors))  # long before the drain timeout
    assert [type(one) for one in once.errors] == [CheckpointError]
