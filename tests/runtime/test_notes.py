"""The note that a handler sets about its current step, in the list of running messages."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tenacity import wait_none

from keyshard import KeyShardSource, Message, RetryLater, RetryPolicy
from keyshard.broker.memory import MemoryCluster
from keyshard.broker.memory import Message as Stored
from keyshard.control import running_source
from keyshard.core.message import NOTE_CHARS, place_of
from keyshard.handlers.outcomes import NOTES_MAX, Notes
from tests.helpers import until, wait_until
from tests.support.command_line import run as command
from tests.support.deadlines import deadline
from tests.support.memory_topic import MemoryTopic
from tests.support.process_handlers import leaves_a_thread_behind, notes_many_steps

pytestmark = pytest.mark.usefixtures("control_folder")

RELEASE = threading.Event()


def handle(message: Message) -> None:
    message.note("step 1 of 2")
    message.note("step 2 of 2")
    assert RELEASE.wait(deadline(60))


async def handle_async(message: Message) -> None:
    message.note("step 1 of 2")
    await asyncio.to_thread(message.note, "step 2 of 2")
    await until(RELEASE.is_set)


def handle_and_return_a_coroutine(message: Message) -> object:
    async def work() -> None:
        message.note("step 2 of 2")
        await until(RELEASE.is_set)

    return work()


def handle_and_fail(message: Message) -> None:
    message.note("before the failure")
    raise RetryLater(deadline(60), "later")


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    RELEASE.clear()
    yield
    RELEASE.set()


@pytest.fixture
def source() -> KeyShardSource:
    topic = MemoryTopic(partitions=1)
    topic.cluster.publish(topic.topic, Stored(b"1", key="order-17"))
    return topic.source(subscription="jobs", parallelism=1)


def run_with(note: str | None, state: str = "running") -> dict[str, Any]:
    """Wait until the message has the note and the state, and return it."""
    found: list[dict[str, Any]] = []

    def is_listed() -> bool:
        found[:] = running_source("jobs").ask("runs")["runs"]
        return [(one["note"], one["state"]) for one in found] == [(note, state)]

    wait_until(is_listed)
    return found[0]


@pytest.mark.parametrize(
    ("handler", "options", "note"),
    [
        (handle, {}, "step 2 of 2"),
        (handle_async, {}, "step 2 of 2"),
        (handle_and_return_a_coroutine, {}, "step 2 of 2"),
        (
            notes_many_steps,
            {"executor": "processes", "workers": 1, "drain_timeout_s": 0.1},
            "step 2000 of 2,000",
        ),
    ],
)
def test_the_newest_note_of_a_message_is_listed(
    source: KeyShardSource, handler: Callable[[Message], Any], options: dict[str, Any], note: str
) -> None:
    with source.running(handler, **options):
        found = run_with(note)
        assert 0 <= found["noteSecondsAgo"] <= found["runningSeconds"] + 0.1
        RELEASE.set()


def test_a_message_that_a_program_took_has_a_note(source: KeyShardSource) -> None:
    async def take() -> None:
        async with source.messages() as messages:
            async for message in messages:
                message.note("step 1")
                message._replace(partition=7).note("a copy has no note")
                await asyncio.to_thread(run_with, "step 1")
                await message.done()
                return

    asyncio.run(take())


def test_a_note_of_a_failed_attempt_is_listed_before_the_retry(source: KeyShardSource) -> None:
    with source.running(handle_and_fail):
        run_with("before the failure", "retrying")


def test_the_command_prints_the_note(
    source: KeyShardSource, capsys: pytest.CaptureFixture[str]
) -> None:
    with source.running(handle):
        run_with("step 2 of 2")
        lines = command(capsys, "stacks", "--subscription", "jobs")[1].splitlines()
        assert lines[1].startswith("  note, ")
        assert lines[1].endswith(" s ago: step 2 of 2")
        RELEASE.set()


def test_a_handler_whose_note_is_no_text_fails(source: KeyShardSource) -> None:
    failures: list[BaseException] = []

    def noted(message: Message) -> None:
        try:
            message.note(17)  # type: ignore[arg-type]
        except TypeError as exc:
            failures.append(exc)

    with source.running(noted):
        wait_until(lambda: bool(failures))
    assert str(failures[0]) == "A note is a text, not int."


def test_outside_of_a_handler_a_note_does_nothing() -> None:
    message = Message.for_test(b"1", key="a")
    message.note("step 1")
    with pytest.raises(TypeError):
        message.note(b"1")  # type: ignore[arg-type]


def test_the_memory_of_notes_is_limited() -> None:
    notes, messages = Notes(), [Message.for_test(b"1")._replace(partition=n) for n in range(3)]
    for number, text in ((0, "a"), (1, "b"), (0, "c")):
        notes.take(place_of(messages[number]), text)
    for partition in range(3, NOTES_MAX + 2):
        notes.take(place_of(messages[2]._replace(partition=partition)), "others")
    assert notes.of(messages[1]) is None, "the oldest one"
    found = notes.of(messages[0])
    assert found is not None
    assert found.text == "c"


def test_notes_of_done_messages_are_forgotten(source: KeyShardSource) -> None:
    """Issue: notes of many done messages displaced the note of a handler that hung."""
    cluster = MemoryCluster.named(source.service_url.removeprefix("memory://"))
    cluster.publish(source.topics[0], *(Stored(b"2", key=f"k{n % 7}") for n in range(300)))
    handled: list[str | None] = []

    def noted(message: Message) -> None:
        message.note("begins")
        if message.value == b"1":
            assert RELEASE.wait(deadline(60))
        handled.append(message.key)

    with source.running(noted, lanes=3):
        wait_until(lambda: len(handled) == 300)
        run_with("begins")
        notes = source._active()._dispatcher.notes.kept
        wait_until(lambda: len(notes) == 1)
        RELEASE.set()
        wait_until(lambda: not notes)


def test_a_note_of_an_earlier_attempt_does_not_come_back(source: KeyShardSource) -> None:
    """Issue: it did while the message waited for a retry after an attempt without a note."""
    attempts: list[int] = []

    def noted(message: Message) -> None:
        attempts.append(len(attempts))
        if attempts[-1] == 0:
            message.note("in the first attempt")
            raise ValueError("first")
        if attempts[-1] == 1:
            raise RetryLater(deadline(60), "second")

    with source.running(noted, retry=RetryPolicy(wait=wait_none())):
        wait_until(lambda: len(attempts) == 2)
        assert run_with(None, "retrying")["error"] == "second"


def test_a_thread_of_a_child_that_outlives_its_handler_stops_no_other(
    source: KeyShardSource,
) -> None:
    """Notes between two requests are read by the next one, and belong to no attempt of it."""
    with source.running(
        leaves_a_thread_behind,
        executor="processes",
        workers=1,
        retry=RetryPolicy(wait=wait_none()),
        drain_timeout_s=0.1,
    ):
        wait_until(lambda: source.status()["counters"]["failedAttempts"] == 1)
        wait_until(lambda: running_source("jobs").ask("runs")["runs"][0]["state"] == "running")


def test_a_long_note_is_cut(source: KeyShardSource) -> None:
    def noted(message: Message) -> None:
        message.note("x" * 1_000)
        assert RELEASE.wait(deadline(60))

    with source.running(noted):
        run_with("x" * NOTE_CHARS)
        RELEASE.set()
