"""The client queue: a guess until messages are seen, never much larger than its share of memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyshard.core.window.receiver_queue_size import (
    FIRST_MIN,
    MESSAGE_BYTES_GUESS,
    MESSAGE_OVERHEAD_BYTES,
    POLLED_MAX,
    SHRINK_MIN,
    PrefetchSize,
    ReceiverQueueSize,
)

SHARE = 250 * (MESSAGE_BYTES_GUESS + MESSAGE_OVERHEAD_BYTES)


def test_it_begins_with_as_many_messages_of_a_guessed_size_as_fit() -> None:
    assert ReceiverQueueSize(SHARE, 1_000).size == 250
    assert ReceiverQueueSize(SHARE, 7).size == 7
    assert ReceiverQueueSize(1, 1_000).size == 1


def test_small_messages_do_not_change_the_receiver_queue_size() -> None:
    queue = ReceiverQueueSize(SHARE, 1_000)
    assert all(queue.suits(50, 50 * size) for size in (100, 0, 10_000, 100))
    assert queue.size == 250


def test_larger_messages_make_it_smaller_at_once_and_it_stays_so() -> None:
    queue = ReceiverQueueSize(SHARE, 1_000)
    assert not queue.suits(10, 10 * 100_000)
    assert queue.size == SHARE // (100_000 + MESSAGE_OVERHEAD_BYTES)
    size = queue.size
    assert all(queue.suits(10, 10 * 100) for _ in range(100))
    assert queue.size == size


def test_messages_that_become_larger_are_followed() -> None:
    queue = ReceiverQueueSize(SHARE, 1_000)
    assert queue.suits(50, 50 * 100)
    rounds = 0
    while queue.size > SHARE / 100_000 * SHRINK_MIN:
        queue.suits(10, 10 * 100_000)
        rounds += 1
        assert rounds < 20, "it never becomes small enough"


@pytest.mark.parametrize("payload", [0, 1, 10_000_000])
def test_it_holds_at_least_one_message(payload: int) -> None:
    queue = ReceiverQueueSize(1_000, 1_000)
    queue.suits(1, payload)
    assert queue.size == 1


def test_small_messages_let_the_queue_grow_step_by_step() -> None:
    ahead = PrefetchSize(1_000, SHARE)
    assert [ahead.size, *(ahead.measure(1, 400) for _ in range(11))] == [
        1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1_000, 1_000,
    ]  # fmt: skip
    large_entries = PrefetchSize(1_000, SHARE)
    assert large_entries.measure(400, 400 * 400) == 800, "so many came already"


def test_one_large_message_makes_it_small_at_once_and_small_ones_let_it_grow_again() -> None:
    ahead = PrefetchSize(1_000, 8 << 20, 1_000)
    assert ahead.measure(1_000, 1_000 * 400) == 1_000
    assert ahead.measure(1, 4 << 20) == 2
    deliveries = 0
    while ahead.measure(2, 2 * 400) < 1_000:
        deliveries += 1
        assert deliveries < 100, "it stays small"
    assert deliveries > 10


@given(
    st.integers(1, 10**9),
    st.integers(1, 1_000),
    st.lists(st.tuples(st.integers(1, 10**4), st.integers(0, 10**7)), min_size=1, max_size=30),
)
def test_permits_never_exceed_the_memory_and_at_most_double(
    bytes_max: int, messages_max: int, deliveries: list[tuple[int, int]]
) -> None:
    ahead = PrefetchSize(messages_max, bytes_max)
    for messages, message_bytes in deliveries:
        before = ahead.size
        size = ahead.measure(messages, messages * message_bytes)
        assert 1 <= size <= messages_max
        assert size == 1 or size * message_bytes <= bytes_max
        assert size <= 2 * max(before, messages)


@given(st.integers(1, 10**9), st.lists(st.integers(0, 10**7), min_size=1, max_size=30))
def test_the_receiver_queue_size_never_grows(share: int, sizes: list[int]) -> None:
    queue = ReceiverQueueSize(share, 1_000)
    for size in sizes:
        before = queue.size
        stays = queue.suits(1, size)
        assert queue.size == before if stays else queue.size * SHRINK_MIN <= before


def test_it_begins_with_a_few_messages_where_the_guess_leaves_room_for_two() -> None:
    queue = ReceiverQueueSize(FIRST_MIN * 1_500, 1_000)
    assert queue.size == FIRST_MIN
    assert queue.suits(10, 10 * 400)
    assert not queue.suits(10, 10 * 100_000)
    assert queue.size == 1
    assert ReceiverQueueSize(3 * MESSAGE_OVERHEAD_BYTES, 1_000).size == 3
    assert ReceiverQueueSize(FIRST_MIN * 1_500, 5).size == 5


def test_small_queues_are_polled() -> None:
    assert ReceiverQueueSize(SHARE, POLLED_MAX).polled
    assert not ReceiverQueueSize(SHARE, 1_000).polled


def test_many_that_begin_together_hold_one_message_each() -> None:
    """64 MiB for 50 consumers, to which messages of 100 KB come: all begin before any has one."""
    share = (64 << 20) // (2 * 50)
    ahead = PrefetchSize(1_000, share)
    assert ahead.size == 1
    assert ahead.measure(1, 100_000) * 100_000 <= share
    rounds = 0
    while ahead.measure(ahead.size, ahead.size * 400) < 1_000:
        rounds += 1
        assert rounds < 100, "small messages soon fill it"


def test_a_client_that_follows_the_size_of_messages_is_not_subscribed_again() -> None:
    queue = ReceiverQueueSize(SHARE, 1_000, adapts=True)
    assert queue.size == 1_000
    assert all(queue.suits(1, size) for size in (100, 10_000_000))
    assert queue.size == 1_000
