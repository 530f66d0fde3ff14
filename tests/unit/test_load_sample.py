"""A stream estimates its hot keys by a few of its messages."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from keyshard.consumers.intake import (
    FADE_S,
    KEY_SAMPLES_MIN,
    SAMPLE_ENTRIES,
    SAMPLE_S,
    SAMPLES_MIN,
    LoadSample,
)
from keyshard.core.ring.slot_load import KEYS_MAX
from tests.helpers import block, present


class Sampling:
    """A sample at a time that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1_000.0
        monkeypatch.setattr("keyshard.consumers.intake.time.monotonic", lambda: self.now_s)
        self.sample = LoadSample()

    def add(self, key: str | None, messages: int = 1, after_s: float = SAMPLE_S) -> None:
        self.now_s += after_s
        self.sample.add([block(1, 0, *[key] * messages)])

    @property
    def counted(self) -> int:
        return self.sample.load().messages

    def shares(self) -> dict[str, float]:
        return {key: round(share, 2) for key, share in present(self.sample.hot_keys(5, 0.01))}


@pytest.fixture
def sampling(monkeypatch: pytest.MonkeyPatch) -> Sampling:
    return Sampling(monkeypatch)


def test_a_message_stands_for_all_since_the_last_one(sampling: Sampling) -> None:
    sampling.add("a", messages=10)
    for _ in range(9):
        sampling.add("b", after_s=0.0)
    assert sampling.counted == 10
    sampling.add("b", messages=3)
    assert sampling.counted == 10 + 10 * 3
    for _ in range(5):
        sampling.add("a", messages=4)
        sampling.add("b", messages=8)
    assert sampling.shares() == {"b": 0.7, "a": 0.3}


def test_many_entries_need_no_time(sampling: Sampling) -> None:
    sampling.add("a")
    sampling.sample.add([block(1, 0, "b")] * (SAMPLE_ENTRIES - 1))
    assert sampling.counted == 1
    sampling.add("b", after_s=0.0)
    assert sampling.counted == 1 + SAMPLE_ENTRIES


def test_keys_that_a_worker_keeps_are_counted_by_slot(sampling: Sampling) -> None:
    """Issue: the row is not in this process, and the query ended with an IndexError."""
    for _ in range(10):
        sampling.now_s += SAMPLE_S
        whole = block(1, 0, "a", "a")
        sampling.sample.add([replace(whole, content=whole.content.slice(0, 0))])
    assert sampling.counted == 20
    assert sampling.sample.hot_keys(5, 0.01) is None, "they are unknown, not none"


def test_keys_of_the_last_minutes_count_most(sampling: Sampling) -> None:
    for _ in range(64):
        sampling.add("old")
    for _ in range(8):
        sampling.add("new", after_s=FADE_S)
    assert sampling.shares()["new"] > 0.8


def test_each_message_of_the_first_delivery_of_an_entry_may_be_sampled(sampling: Sampling) -> None:
    for _ in range(200):
        sampling.now_s += SAMPLE_S
        sampling.sample.add([block(1, 0, "a", "b").joined(block(1, 0, "c", first=2, of=3))])
    assert sampling.shares().keys() == {"a", "b"}  # only of the first delivery of an entry


def test_messages_without_a_key_do_not_count(sampling: Sampling) -> None:
    sampling.add(None)
    sampling.sample.add([])
    assert sampling.counted == 0


def test_a_key_in_few_samples_is_not_hot(sampling: Sampling) -> None:
    sampling.add("first")
    assert sampling.shares() == {}
    sampling.sample.add([block(1, 0, "second")] * (SAMPLE_ENTRIES - 1))
    sampling.add("second", after_s=0.0)
    for number in range(300):
        sampling.add(f"cold-{number}")
    assert sampling.sample.load().hot_keys(5, 0.01)  # the one sample of many entries
    assert sampling.shares() == {}


def test_a_key_is_hot_from_a_few_samples_on(sampling: Sampling) -> None:
    for number in range(SAMPLES_MIN - KEY_SAMPLES_MIN):
        sampling.add(f"cold-{number}")
    for _ in range(KEY_SAMPLES_MIN):
        assert sampling.shares() == {}
        sampling.add("hot")
    assert sampling.shares() == {"hot": 0.3}


def test_samples_of_keys_are_limited(sampling: Sampling) -> None:
    for number in range(3 * KEYS_MAX):
        sampling.add(f"cold-{number}" if number % 4 else "hot")
    assert len(sampling.sample._key_samples) <= 2 * KEYS_MAX
    assert sampling.shares().keys() == {"hot"}
