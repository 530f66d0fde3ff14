"""Handlers that publish: outputs are stored before their messages are acknowledged."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from keyshard import KeyShardSink, Message, Produce, Reject
from keyshard.config.connection import Connection
from keyshard.errors import ConfigError, UnfitHandlerError
from tests.helpers import DEADLINE_S, present, wait_until
from tests.support.copied_topic import Copied
from tests.support.deadlines import deadline
from tests.support.handled_topic import AT_ONCE


def twice(keys: int, per_key: int) -> dict[str, list[bytes]]:
    """Outputs of handlers that answer each message by two."""
    return {f"key-{k}": [b"%d" % n for n in range(per_key) for _ in "ab"] for k in range(keys)}


def one_by_one(message: Message) -> Iterator[Produce]:
    yield Produce(message.value, key=message.key)
    yield Produce(message.value, key=message.key)


def as_list(message: Message) -> list[Produce]:
    return list(one_by_one(message))


def as_tuple(message: Message) -> tuple[Produce, ...]:
    return tuple(one_by_one(message))


async def awaited(message: Message) -> Sequence[Produce]:
    return as_list(message)


async def yielded(message: Message) -> AsyncIterator[Produce]:
    for one in one_by_one(message):
        yield one


def later(message: Message) -> Any:
    return awaited(message)


def later_yielded(message: Message) -> Any:
    return yielded(message)


@pytest.mark.parametrize(
    "handle", [one_by_one, as_list, as_tuple, awaited, yielded, later, later_yielded]
)
def test_every_form_of_a_handler_publishes_in_key_order(
    copied: Copied, handle: Callable[[Message], Any]
) -> None:
    copied.publish(keys=7, per_key=20)
    with copied.running(copied.source(), handle, sink=copied.sink):
        wait_until(lambda: copied.backlog() == 0)
    assert not copied.errors
    assert copied.by_key() == twice(7, 20)


def test_processes_publish_in_key_order(copied: Copied) -> None:
    copied.publish(keys=7, per_key=20)
    options = {"executor": "processes", "workers": 2, "sink": copied.sink}
    with copied.running(copied.source(), one_by_one, **options):
        wait_until(lambda: copied.backlog() == 0)
    assert not copied.errors
    assert copied.by_key() == twice(7, 20)


def test_all_that_an_output_has_is_published_also_to_other_topics(copied: Copied) -> None:
    other = copied.cluster.create_topic("other", 0)
    at = datetime(2026, 3, 1, tzinfo=timezone.utc)
    copied.publish(keys=1, per_key=1)

    def handle(_: Message) -> list[Produce]:
        return [
            Produce(b"a", key="k", ordering_key="o", properties={"x": "1"}, event_time=at),
            Produce(None, topic="other"),
            Produce(b"c", key="", topic=other),
        ]

    with copied.running(copied.source(), handle, sink=copied.sink) as run:
        wait_until(lambda: copied.backlog() == 0)
        counters = run.source.status()["counters"]
    (one,) = copied.stored()
    assert (one.value, one.key, one.ordering_key, one.event_time) == (b"a", "k", "o", at)
    assert one.properties == {"x": "1"}
    assert copied.by_key(other) == {None: [None], "": [b"c"]}
    assert (counters["outputsPublished"], counters["outputsConfirmed"]) == (3, 3)


def test_nothing_is_acknowledged_before_its_outputs_are_confirmed(copied: Copied) -> None:
    copied.publish(keys=5, per_key=3)
    copied.hold()
    with copied.running(copied.source(), as_list, sink=copied.sink) as run:
        run.wait_started()
        wait_until(lambda: present(run.source.status()["counters"]["completed"]) >= 5)
        assert copied.backlog() == 15
        assert [lane["handled"] for lane in run.source.status()["ranges"] if lane["handled"]] == []
        copied.release()
        wait_until(lambda: copied.backlog() == 0)
    assert copied.by_key() == twice(5, 3)


@pytest.mark.simulated
def test_a_stalled_output_topic_holds_back_input_and_is_named(copied: Copied) -> None:
    copied.publish(keys=40, per_key=10)
    copied.hold()
    sink = KeyShardSink(copied.out, service_url=copied.url, linger_ms=1, send_timeout_ms=60_000)
    with copied.running(copied.source(parallelism=2), as_list, sink=sink, lanes=4) as run:
        run.wait_started()
        wait_until(
            lambda: any(
                each["stalled"] is not None and "confirmed its outputs" in each["stalled"]["reason"]
                for each in run.source.status()["ranges"]
            ),
            deadline(20),
        )
        counters = run.source.status()["counters"]
        assert present(counters["completed"]) <= 8
        assert copied.backlog() == 400
        copied.release()
        wait_until(lambda: copied.backlog() == 0)
    assert copied.by_key() == twice(40, 10)


@pytest.mark.simulated
def test_an_output_that_is_not_confirmed_is_published_again_by_another_attempt(
    copied: Copied,
) -> None:
    copied.publish(keys=3, per_key=2)
    copied.cluster.exceed_quota(copied.out, exceeded=True)
    sink = KeyShardSink(copied.out, service_url=copied.url, linger_ms=1, send_timeout_ms=200)
    with copied.running(copied.source(), as_list, sink=sink) as run:
        run.wait_started()
        wait_until(lambda: present(run.source.status()["counters"]["outputsFailed"]) >= 3)
        assert copied.backlog() == 6
        copied.cluster.exceed_quota(copied.out, exceeded=False)
        wait_until(lambda: copied.backlog() == 0)
        assert present(run.source.status()["counters"]["failedAttempts"]) >= 1
    assert copied.by_key() == twice(3, 2)


def test_a_refused_output_makes_its_message_a_dead_letter_and_others_continue(
    copied: Copied,
) -> None:
    copied.publish(keys=4, per_key=3)
    copied.cluster.create_topic("orders-keyshard-DLQ", 0)

    def handle(message: Message) -> list[Produce]:
        large = message.key == "key-0" and message.value == b"1"
        return [Produce(b"x" * 6_000_000 if large else message.value, key=message.key)]

    options: dict[str, Any] = {"retry": AT_ONCE, "on_failure": "dead_letter", "sink": copied.sink}
    with copied.running(copied.source(), handle, **options):
        wait_until(lambda: copied.backlog() == 0)
    (dead,) = copied.stored("persistent://public/default/orders-keyshard-DLQ")
    assert dead.value == b"1"
    assert "MessageTooLargeError" in str(dead.properties)
    assert copied.by_key()["key-0"] == [b"0", b"2"]


def test_a_failed_attempt_publishes_nothing(copied: Copied) -> None:
    copied.publish(keys=1, per_key=3)
    failures: list[int] = []

    def handle(message: Message) -> Iterator[Produce]:
        yield Produce(message.value, key=message.key)
        if message.value == b"1" and len(failures) < 2:
            failures.append(1)
            raise ValueError("half way")
        if message.value == b"2":
            yield Reject("not this one")  # type: ignore[misc]

    with copied.running(copied.source(), handle, sink=copied.sink, retry=AT_ONCE):
        wait_until(lambda: copied.backlog() == 0)
    assert copied.by_key() == {"key-0": [b"0", b"1"]}


@pytest.mark.parametrize("result", [{"value": b"x"}, [b"x"], "text", 7, [Produce(b"x"), None]])
def test_a_result_that_is_no_output_ends_the_run_and_acknowledges_nothing(
    copied: Copied, result: object
) -> None:
    copied.publish(keys=1, per_key=1)
    with copied.running(copied.source(), lambda _: result, sink=copied.sink) as run:
        run.thread.join(DEADLINE_S)
    (error,) = copied.errors
    assert isinstance(error, UnfitHandlerError)
    assert "keyshard.Produce" in str(error)
    assert copied.stored() == []
    assert copied.backlog() == 1


@pytest.mark.parametrize("result", [Produce(b"x"), [Produce(b"x")]])
def test_an_output_without_a_sink_ends_the_run_by_name(copied: Copied, result: object) -> None:
    copied.publish(keys=1, per_key=1)
    with copied.running(copied.source(), lambda _: result) as run:
        run.thread.join(DEADLINE_S)
    (error,) = copied.errors
    assert isinstance(error, UnfitHandlerError)
    assert "sink" in str(error)
    assert copied.backlog() == 1


def test_a_generator_without_a_sink_is_refused(copied: Copied) -> None:
    for handle in (one_by_one, yielded):
        with pytest.raises(UnfitHandlerError, match="sink="):
            copied.source().run(handle)
    with pytest.raises(ConfigError, match="sink"):
        copied.source().run(as_list, sink="copies")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {"value": "text"}, {"key": b"k"}, {"ordering_key": 1}, {"properties": {"a": 1}},
        {"properties": [1]}, {"event_time": datetime(2026, 1, 1)}, {"topic": 5},  # noqa: DTZ001
        {"deliver_at": datetime(1960, 1, 1, tzinfo=timezone.utc)}, {"event_time": 5},
    ],
)  # fmt: skip
def test_a_wrong_output_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        Produce(**({"value": b"x"} | fields))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_stop_does_not_wait_for_the_broker_of_the_sink(
    copied: Copied, checkpointed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No broker listens at the URL of the sink, and its timeout is long."""
    monkeypatch.setattr("keyshard.handlers.run.START_S", 0.1)
    options = {"checkpoint": str(tmp_path / "checkpoint")} if checkpointed else {}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"pulsar://127.0.0.1:{taken.getsockname()[1]}"
        connection = Connection(url, operation_timeout_ms=300_000)
        sink = KeyShardSink(copied.out, sink_id="s", connection=connection)
        with copied.running(copied.source(), as_list, sink=sink, **options) as run:
            wait_until(run._stopped)
            run.thread.join(deadline(10))
            assert not run.thread.is_alive()
    assert copied.errors == []
