"""Dead letters are listed page by page, and shown whole, with a running source and without."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keyshard.broker.memory.admin import MemoryAdmin
from keyshard.core.dead_letter import DeadLetter, DeadLetterKind
from keyshard.core.dead_letter_filter import DeadLetterFilter
from keyshard.core.message import MessageId
from keyshard.core.position.entry import EntryId
from keyshard.dead_letters import browser as browser_module
from keyshard.dead_letters.browser import DeadLetterBrowser
from keyshard.dead_letters.startup import open_browser
from keyshard.errors import ConfigError
from tests.helpers import config, present
from tests.support.dead_letter_topic import (
    DeadLetterTopic,
    dead_letter,
    discard,
    large,
    replay,
)

EVERY, REJECTED = DeadLetterFilter(), DeadLetterFilter(rejected=True)


def offline(dlq: DeadLetterTopic) -> DeadLetterBrowser:
    """The dead letters as another process reads them, without a subscription of its own."""
    admin = MemoryAdmin(dlq.cluster)
    return open_browser(dlq.connect(), admin, config("orders"), dlq.where.topic)


def numbers(browser: DeadLetterBrowser, wanted: DeadLetterFilter = EVERY) -> list[int]:
    return [int(present(one.message.value).split()[0]) for one in browser.all(wanted)]


def test_pages_hold_every_dead_letter_once(
    dlq: DeadLetterTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead_letters = dlq.open()
    for number in range(20):
        dead_letters.send(dead_letter(number, "ab"[number % 2]))
    for one in (dead_letters.browser, offline(dlq)):
        found: list[int] = []
        examined, start, pages = 0, None, 0
        while pages == 0 or start is not None:
            page = one.page(DeadLetterFilter("b"), start, limit=3)
            found += [
                int(present(stored.dead_letter.message.value)) for stored in page.dead_letters
            ]
            examined, start, pages = examined + page.examined, page.next, pages + 1
        assert (found, pages) == ([*range(1, 20, 2)], 4)
        assert examined == 19, "from the first dead letter of the key to its last"
        # A page also ends by its time and its size, and always has a next message.
        monkeypatch.setattr(browser_module, "PAGE_S", -1.0)
        assert one.page(EVERY).examined == 1
        assert numbers(one) == [*range(20)]
        monkeypatch.undo()
        monkeypatch.setattr(browser_module, "PAGE_BYTES_MAX", 3)
        assert len(one.page(EVERY).dead_letters) == 2
        monkeypatch.undo()


def test_done_dead_letters_are_not_listed(dlq: DeadLetterTopic) -> None:
    dead_letters = dlq.open()
    for number in range(3):
        for key in "abc":
            dead_letters.send(dead_letter(number, key))
    assert replay(dead_letters, "a", 2) == [0, 1]
    assert discard(dead_letters, "b") == 3
    for one in (dead_letters.browser, offline(dlq)):
        assert [(each.key, present(each.message.value)) for each in one.all(EVERY)] == [
            ("c", b"0"), ("c", b"1"), ("a", b"2"), ("c", b"2"),
        ]  # fmt: skip


def test_rejected_dead_letters_are_listed_until_they_are_discarded(dlq: DeadLetterTopic) -> None:
    dead_letters = dlq.open()
    for number, kind in enumerate(DeadLetterKind):
        dead_letters.send(dead_letter(number, kind=kind))
    dead_letters.send(dead_letter(3, "other", DeadLetterKind.REJECTED))
    dead_letters.send(dead_letter(9, by="another source", kind=DeadLetterKind.REJECTED))
    assert numbers(offline(dlq), REJECTED) == [1, 2, 3]
    assert numbers(offline(dlq)) == [0]
    of_other = replace(REJECTED, key="other")
    assert dead_letters.discard_rejected(of_other, dry_run=True) == 1
    assert dead_letters.discard_rejected(of_other) == 1
    assert numbers(offline(dlq), REJECTED) == [1, 2]


def test_a_topic_that_does_not_exist_is_not_created_by_a_list(dlq: DeadLetterTopic) -> None:
    dlq.cluster.delete_topic(dlq.where.topic)
    assert numbers(offline(dlq)) == numbers(offline(dlq), REJECTED) == []
    assert dlq.where.topic not in dlq.cluster.topics()


def test_a_dead_letter_in_parts_is_shown_whole(dlq: DeadLetterTopic) -> None:
    dead_letters = dlq.open()
    dead_letters.send(dead_letter(0))
    dead_letters.send(large(1, 6_000_000, properties={"a": "1"}))
    for one in (dead_letters.browser, offline(dlq)):
        (stored,) = (each for each in one.page(EVERY).dead_letters if each.parts)
        assert len(stored.parts) > 1
        whole = one.one(MessageId(7, 1, 0))
        assert len(present(whole.message.value)) == 6_000_002
        assert whole.message.properties == {"a": "1"}
        assert whole.written_at is not None
        assert numbers(one) == [0, 1]


def test_an_id_that_several_topic_partitions_have_needs_the_topic_partition(
    dlq: DeadLetterTopic,
) -> None:
    dead_letters = dlq.open()
    first = dead_letter(0)
    other = first.message._replace(partition=3)
    dead_letters.send(first)
    dead_letters.send(DeadLetter(other, "unit", DeadLetterKind.PARKED, 1, "E: no"))
    dead_letters.send(dead_letter(5, kind=DeadLetterKind.REJECTED))
    browser = dead_letters.browser
    with pytest.raises(ConfigError, match="several topic partitions have the id 7:0:0"):
        browser.one(MessageId(7, 0, 0))
    assert browser.one(MessageId(7, 0, 0), other.topic, 3).error_kind == "E"
    assert browser.one(MessageId(7, 5, 0)).kind is DeadLetterKind.REJECTED
    for missing in ((MessageId(7, 4, 0), None, None), (MessageId(7, 0, 0), "other", None)):
        with pytest.raises(ConfigError, match="No dead letter"):
            browser.one(*missing)


def test_a_discard_leaves_out_dead_letters_that_are_gone_or_being_unparked(
    dlq: DeadLetterTopic,
) -> None:
    dead_letters = dlq.open()
    for number in range(4):
        for key in "ab":
            dead_letters.send(dead_letter(number, key))
    chosen = dead_letters.browser.matching(EVERY)
    assert dead_letters.keys.unpark("b")
    assert sum(one.dead_letters for one in dead_letters.discard({"a": chosen["a"][1:3]})) == 2
    assert [one.key for one in dead_letters.discard(chosen)] == ["a"]
    assert dead_letters.discard({"c": [EntryId(0, 0)], **chosen}) == []
    dlq.die()
    again = dlq.open()
    assert numbers(again.browser) == [0, 1, 2, 3]
    assert list(again.keys.parking.states()) == ["b"]
