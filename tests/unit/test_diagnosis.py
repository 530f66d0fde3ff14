"""The findings of the doctor about facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from keyshard.core.diagnosis import (
    Finding,
    Level,
    Sample,
    judge_batching,
    judge_deduplication,
    judge_fill,
    judge_orphans,
    judge_subscription,
    judge_version,
)
from keyshard.core.load_diagnosis import Load, judge_load
from keyshard.core.ring.hash_range import HashRange, split_ring
from keyshard.core.subscription_state import BrokerLimits, ConsumerState, SubscriptionState
from tests.helpers import P0, P1, block

IDLE = SubscriptionState(
    kind="Key_Shared", sticky=True, out_of_order=False, durable=True,
    backlog=0, in_replay=0, ack_gaps=0, blocked=False, consumers=(),
)  # fmt: skip
WHOLE = replace(IDLE, consumers=tuple(ConsumerState("c", "a", (part,)) for part in split_ring(4)))
OTHER = (ConsumerState("c", "a", ()),)


def levels(findings: Sequence[Finding]) -> dict[str, Level]:
    return {finding.about: finding.level for finding in findings}


def text_of(findings: Sequence[Finding], about: str) -> str:
    return " ".join(finding.text for finding in findings if finding.about == about)


@pytest.mark.parametrize(
    ("version", "level"),
    [
        ("4.0.8", Level.OK),
        ("4.1.0-SNAPSHOT", Level.OK),
        ("10.0.0", Level.OK),
        ("3.3.9", Level.WARNING),
        ("master", Level.WARNING),
    ],
)
def test_old_and_strange_versions_are_worth_a_warning(version: str, level: Level) -> None:
    assert judge_version(version).level is level


def test_batches_that_mix_keys_are_a_problem() -> None:
    sample = Sample()
    sample.add(P0, block(1, 0, "a", "a"))
    sample.add(P0, block(1, 1, "a", "b", "b"))
    (finding,) = judge_batching(sample)
    assert finding.level is Level.PROBLEM
    assert "1 of 2 batches mix keys" in finding.text
    assert "KeyBased" in finding.advice


def test_an_entry_that_comes_in_parts_is_one_batch() -> None:
    sample = Sample()
    sample.add(P0, block(1, 0, "a", of=3))
    sample.add(P0, block(1, 0, "b", "a", of=3, first=1))
    sample.add(P1, block(1, 0, "c", "c"))
    assert (sample.entries, sample.batches, sample.mixed, sample.messages) == (2, 2, 1, 5)


def test_key_based_and_no_batching_are_distinguished_and_keyless_messages_named() -> None:
    keyed, plain = Sample(), Sample()
    keyed.add(P0, block(1, 0, "a", "a"))
    plain.add(P0, block(1, 0, "a"))
    plain.add(P0, block(1, 1, None))
    assert judge_batching(keyed)[0].text.startswith("by key")
    assert judge_batching(plain)[0].text.startswith("none")
    assert levels(judge_batching(plain)) == {"batching": Level.OK, "keys": Level.WARNING}
    assert levels(judge_batching(Sample())) == {"batching": Level.WARNING}


def test_a_sound_or_missing_subscription_is_no_problem() -> None:
    assert levels(judge_subscription({P0: {}}, "s")) == {"subscription": Level.OK}
    assert levels(judge_subscription({P0: {"s": IDLE}}, "s")) == {"subscription": Level.OK}
    assert levels(judge_subscription({P0: {"s": WHOLE}}, "s")) == {
        "subscription": Level.OK,
        "coverage": Level.OK,
    }


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kind": "Shared", "sticky": False}, "is of type Shared"),
        ({"kind": "Exclusive", "sticky": False}, "is of type Exclusive"),
        ({"sticky": False}, "AUTO_SPLIT"),
        ({"out_of_order": True}, "out-of-order"),
    ],
)
def test_another_type_or_policy_in_use_is_a_problem(changes: dict[str, Any], says: str) -> None:
    findings = judge_subscription({P0: {"s": replace(IDLE, consumers=OTHER, **changes)}}, "s")
    assert levels(findings)["subscription"] is Level.PROBLEM
    assert says in text_of(findings, "subscription")


def test_another_type_without_consumers_is_a_warning() -> None:
    findings = judge_subscription({P0: {"s": replace(IDLE, kind="Shared")}}, "s")
    assert levels(findings) == {"subscription": Level.WARNING}


def test_a_gap_in_the_ring_is_a_problem_and_is_named() -> None:
    gappy = replace(WHOLE, consumers=WHOLE.consumers[1:])
    findings = judge_subscription({P0: {"s": gappy}, P1: {"s": WHOLE}}, "s")
    assert levels(findings)["coverage"] is Level.PROBLEM
    assert "slots 0-16383 of" in text_of(findings, "coverage")
    assert str(P0) in text_of(findings, "coverage")


def test_a_topic_partition_without_consumers_beside_others_is_a_problem() -> None:
    findings = judge_subscription({P0: {"s": WHOLE}, P1: {"s": IDLE}}, "s")
    assert levels(findings)["coverage"] is Level.PROBLEM


def test_a_subscription_on_some_topic_partitions_only_is_a_warning() -> None:
    assert levels(judge_subscription({P0: {"s": IDLE}, P1: {}}, "s")) == {
        "subscription": Level.WARNING
    }


def test_a_subscription_that_is_frozen_is_a_problem() -> None:
    consumer = ConsumerState("c", "a", (HashRange(0, 65_535),), 50_000, blocked=True)
    findings = judge_subscription({P0: {"s": replace(IDLE, consumers=(consumer,))}}, "s")
    assert levels(findings)["unacknowledged"] is Level.PROBLEM


def test_orphans_are_other_subscriptions_with_data_and_without_consumers() -> None:
    states = {
        P0: {
            "s": replace(IDLE, backlog=5),
            "old": replace(IDLE, backlog=7),
            "used": replace(IDLE, backlog=7, consumers=OTHER),
            "reader-1": replace(IDLE, backlog=7, durable=False),
            "done": IDLE,
        },
        P1: {"old": replace(IDLE, backlog=1)},
    }
    (finding,) = judge_orphans(states, "s")
    assert finding.level is Level.WARNING
    assert "'old' (8 entries)" in finding.text
    assert "used" not in finding.text
    assert "reader-1" not in finding.text
    assert levels(judge_orphans({P0: {"s": IDLE}}, "s")) == {"orphans": Level.OK}


def test_a_replay_queue_and_ack_gaps_near_their_limits_are_reported() -> None:
    limits = BrokerLimits()
    assert judge_fill({P0: {"s": WHOLE}}, "s", limits) == []
    near = replace(WHOLE, in_replay=4_000, ack_gaps=5_000)
    assert levels(judge_fill({P0: {"s": near}}, "s", limits)) == {
        "replay queue": Level.WARNING,
        "ack gaps": Level.WARNING,
    }
    full = replace(WHOLE, in_replay=8_000)
    assert levels(judge_fill({P0: {"s": full}}, "s", limits)) == {"replay queue": Level.PROBLEM}


def load(**changes: Any) -> Load:
    fields: dict[str, Any] = {
        "rate_per_s": 1_000.0,
        "message_bytes": 100.0,
        "messages_per_entry": 1.0,
        "partitions": 5,
        "parallelism": 10,
        "window_rows_max": 200_000,
        "window_bytes_max": 256 * 1024 * 1024,
    }
    return Load(**(fields | changes))


def test_a_load_within_all_limits_names_the_first_that_would_bite() -> None:
    (finding,) = judge_load(load(), BrokerLimits())
    assert finding.level is Level.OK
    # 200,000 rows at 1,000 per second.
    assert "window of 200,000 rows is full after 200 s" in finding.text


@pytest.mark.parametrize(
    ("changes", "about", "says"),
    [
        ({"rate_per_s": 20_000.0}, "window", "10.0 s"),
        ({"message_bytes": 1e6}, "window", "bytes is full after 0.3 s"),
        ({"rate_per_s": 60_000.0}, "entries per second", "12,000 entries per second"),
        # One of 2 ranges of the only topic partition: 4,000 entries at 500 per second.
        ({"partitions": 1, "parallelism": 2}, "replay queue", "8.0 s"),
        ({"partitions": 1, "parallelism": 2}, "ack gaps", "20.0 s"),
        ({"message_bytes": 6e6}, "message size", "exceed the broker's limit of 5,242,880"),
    ],
)
def test_limits_that_bite_soon_are_named_with_their_time(
    changes: dict[str, Any], about: str, says: str
) -> None:
    findings = judge_load(load(**changes), BrokerLimits())
    assert levels(findings)[about] is not Level.OK
    assert says in text_of(findings, about)


def test_entries_with_many_messages_spare_the_limits_on_entries() -> None:
    findings = judge_load(
        load(partitions=1, parallelism=2, messages_per_entry=50.0), BrokerLimits()
    )
    assert levels(findings) == {"limits": Level.OK}


def test_a_topic_without_limits_on_unacknowledged_messages_is_judged_without_them() -> None:
    limits = BrokerLimits().with_unacknowledged(0, 0)
    big = load(rate_per_s=50_000.0, window_rows_max=10**9, messages_per_entry=1_000.0)
    assert levels(judge_load(big, limits)) == {"limits": Level.OK}
    strict = BrokerLimits().with_unacknowledged(1_000, 200_000)
    assert levels(judge_load(big, strict))["unacknowledged"] is Level.WARNING


def test_a_load_of_unknown_size_is_judged_without_the_limits_in_bytes() -> None:
    """Issue: messages of an empty topic counted as 0 bytes."""
    known = judge_load(load(window_bytes_max=1), BrokerLimits())
    assert "window of 1 bytes" in text_of(known, "window")
    findings = judge_load(load(message_bytes=None, window_bytes_max=1), BrokerLimits())
    assert levels(findings) == {"limits": Level.OK, "message size": Level.WARNING}
    assert text_of(findings, "message size").startswith("unknown: no message was sampled")


def test_deduplication_that_the_role_may_not_see_is_unknown() -> None:
    finding = judge_deduplication(P0.topic, enabled=None, by_topic=False)
    assert finding.level is Level.WARNING
    assert finding.text.startswith("unknown: the role may not read whether")
