"""What is wrong with a topic, a subscription or a load, before or while a source runs.

Each check is a function from facts to findings. ``keyshard doctor`` gathers the facts
(:mod:`keyshard.observe.doctor`) and shows the findings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.subscription_state import BrokerLimits, SubscriptionState

States = Mapping[TopicPartition, Mapping[str, SubscriptionState]]
"""Every subscription of each topic partition, by name."""

OLDEST_VERSION = (4, 0)
"""Oldest release of the broker that keyshard is tested with."""
NEAR = 0.5
"""Part of a limit from which it is worth a warning."""
_NAMES_MAX = 3


class Level(str, Enum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    about: str
    """What was looked at, in a word or two."""
    text: str
    advice: str = ""
    """What to do; empty when there is nothing to do."""


class Sample:
    """What some stored entries show of how a topic is produced."""

    def __init__(self) -> None:
        self.entries = 0
        self.messages = 0
        self.batches = 0
        """Entries with several messages."""
        self.mixed = 0
        """Entries whose messages have different slots: their producer batches by default."""
        self.keyless = 0
        """Messages without a key."""
        self.message_bytes = 0
        """Values, keys and properties of all messages, bytes."""
        self._last: tuple[TopicPartition, EntryId] | None = None
        self._last_mixed = False
        self._last_slot: int | None = None

    def add(self, where: TopicPartition, block: EntryBlock) -> None:
        """Count a block; the blocks of one entry come one after the other."""
        again = self._last == (where, block.id)
        if not again:
            self.entries += 1
            self.batches += block.batch_size > 1
            self._last_mixed = False
        mixed = block.mixed_slots is not None or (again and block.slot != self._last_slot)
        self.mixed += mixed and not self._last_mixed
        self._last_mixed |= mixed
        self._last, self._last_slot = (where, block.id), block.slot
        self.messages += block.rows
        self.keyless += sum(slot is None for slot in block.slots)
        self.message_bytes += block.payload_bytes + block.other_bytes

    @property
    def messages_per_entry(self) -> float:
        """Mean; 1 when nothing was seen."""
        return self.messages / self.entries if self.entries else 1.0


def judge_version(version: str) -> Finding:
    """The broker's release against what keyshard is tested with."""
    about = "broker version"
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        return Finding(
            Level.WARNING, about, f"The broker calls itself {version!r}.", "Check what it is."
        )
    if tuple(map(int, match.groups())) >= OLDEST_VERSION:
        return Finding(Level.OK, about, f"Pulsar {version}.")
    oldest = ".".join(map(str, OLDEST_VERSION))
    return Finding(
        Level.WARNING,
        about,
        f"Pulsar {version} is older than {oldest}: a range that joins may be held up by those that "
        "joined before (apache/pulsar#23271), and keyshard is not tested with it.",
        f"Use {oldest} or newer.",
    )


def judge_batching(sample: Sample) -> list[Finding]:
    """How the sampled messages are batched, and whether they have keys."""
    about = "batching"
    seen = f"{sample.messages} messages in {sample.entries} entries were looked at"
    if not sample.entries:
        return [
            Finding(
                Level.WARNING,
                about,
                "Nothing is stored, so the batching of the producers was not seen.",
                "Publish a few messages and run this again.",
            )
        ]
    findings = []
    if sample.mixed:
        findings.append(
            Finding(
                Level.PROBLEM,
                about,
                f"default: {sample.mixed} of {sample.batches} batches mix keys ({seen}). The "
                "broker routes a batch by its first key, so the order of the others is lost.",
                "Let every producer batch by key (BatchingType.KeyBased, in Java "
                "BatcherBuilder.KEY_BASED), or not at all.",
            )
        )
    else:
        kind = (
            f"key based: {sample.batches} batches with one key each" if sample.batches else "none"
        )
        findings.append(Finding(Level.OK, about, f"{kind} ({seen})."))
    if sample.keyless:
        findings.append(
            Finding(
                Level.WARNING,
                "keys",
                f"{sample.keyless} of {sample.messages} messages have no key. They have no order "
                "and go to any range.",
                "Give them a key where order matters, or choose null_keys.",
            )
        )
    return findings


def judge_subscription(states: States, subscription: str) -> list[Finding]:
    """Type and policy of a subscription against what keyshard needs, and its coverage."""
    about = "subscription"
    found = {
        where: all_of[subscription] for where, all_of in states.items() if subscription in all_of
    }
    if not found:
        text = f"{subscription!r} does not exist yet; the first start makes it."
        return [Finding(Level.OK, about, text)]
    findings = [
        *_clashes(found, subscription),
        *_partly_missing(states, found, subscription),
        *_coverage(found),
        *_frozen(found),
    ]
    backlog = sum(state.backlog for state in found.values())
    consumers = sum(len(state.consumers) for state in found.values())
    if all(finding.about != about for finding in findings):
        text = f"{subscription!r} has {consumers} consumers and {backlog} entries of backlog."
        findings.insert(0, Finding(Level.OK, about, text))
    return findings


def judge_orphans(states: States, subscription: str) -> list[Finding]:
    """Other subscriptions that hold data back and that nobody consumes."""
    backlogs: dict[str, int] = {}
    for all_of in states.values():
        for name, state in all_of.items():
            if name != subscription and state.durable and not state.consumers:
                backlogs[name] = backlogs.get(name, 0) + state.backlog
    orphans = {name: backlog for name, backlog in backlogs.items() if backlog}
    if not orphans:
        return [Finding(Level.OK, "orphans", "No other subscription holds data unconsumed.")]
    listed = ", ".join(f"{name!r} ({count} entries)" for name, count in sorted(orphans.items()))
    return [
        Finding(
            Level.WARNING,
            "orphans",
            f"Nobody consumes {listed}; the broker keeps everything they have not acknowledged.",
            "Delete what is not needed: pulsar-admin topics unsubscribe.",
        )
    ]


def judge_fill(states: States, subscription: str, limits: BrokerLimits) -> list[Finding]:
    """Replay queue and holes of a subscription against the broker's limits, as they are now."""
    findings = []
    for where, all_of in states.items():
        state = all_of.get(subscription)
        if state is None:
            continue
        replay_max = limits.replay(len(state.consumers))
        if replay_max and state.in_replay >= NEAR * replay_max:
            findings.append(
                Finding(
                    Level.PROBLEM if state.in_replay >= replay_max else Level.WARNING,
                    "replay queue",
                    f"{state.in_replay} of {replay_max} entries of {where} wait for a range that "
                    "does not take them; at the limit all ranges stop.",
                    "Find the slow or missing range: keyshard status.",
                )
            )
        if limits.ack_holes and state.ack_holes >= NEAR * limits.ack_holes:
            findings.append(
                Finding(
                    Level.WARNING,
                    "ack holes",
                    f"{where} has {state.ack_holes} of {limits.ack_holes} holes; what is beyond is "
                    "delivered again after a restart of the broker.",
                    "Find the slow range: keyshard status. Or raise "
                    "managedLedgerMaxUnackedRangesToPersist.",
                )
            )
    return findings


def _clashes(found: Mapping[TopicPartition, SubscriptionState], subscription: str) -> list[Finding]:
    clashing: dict[tuple[str, bool], list[TopicPartition]] = {}
    for where, state in found.items():
        reason = ""
        if state.kind and state.kind != "Key_Shared":
            reason = f"is of type {state.kind}"
        elif state.consumers and not state.sticky:
            reason = "splits the ring automatically (AUTO_SPLIT)"
        elif state.consumers and state.out_of_order:
            reason = "allows messages of one key to overtake each other"
        if reason:
            clashing.setdefault((reason, bool(state.consumers)), []).append(where)
    findings = []
    for (reason, in_use), places in clashing.items():
        on = f"{subscription!r} {reason} on {_listed(places)}"
        if in_use:
            findings.append(
                Finding(
                    Level.PROBLEM,
                    "subscription",
                    f"{on}, and consumers are connected: keyshard, which is Key_Shared with sticky "
                    "ranges, is refused.",
                    "Stop those consumers, or give keyshard a subscription of its own.",
                )
            )
        else:
            findings.append(
                Finding(
                    Level.WARNING,
                    "subscription",
                    f"{on}; nobody is connected. keyshard can take it over, with its backlog.",
                    "Make sure that its old consumers do not come back.",
                )
            )
    return findings


def _partly_missing(
    states: States, found: Mapping[TopicPartition, SubscriptionState], subscription: str
) -> list[Finding]:
    missing = [where for where in states if where not in found]
    if not missing:
        return []
    return [
        Finding(
            Level.WARNING,
            "subscription",
            f"{subscription!r} does not exist on {_listed(missing)}, but on the others.",
            "Start the source: it makes the missing ones, at the beginning of what is stored.",
        )
    ]


def _coverage(found: Mapping[TopicPartition, SubscriptionState]) -> list[Finding]:
    sticky = {
        where: state
        for where, state in found.items()
        if state.consumers and state.kind == "Key_Shared" and state.sticky
    }
    if not sticky:
        return []
    holes = {where: state.gaps for where, state in sticky.items() if state.gaps}
    unconsumed = [where for where, state in found.items() if not state.consumers]
    findings = [
        Finding(
            Level.PROBLEM,
            "coverage",
            f"Nobody owns the slots {_listed(ranges)} of {where}. Their messages wait, and then "
            "all ranges of the topic partition stop.",
            "Start what owns them; one source owns the whole ring.",
        )
        for where, ranges in holes.items()
    ]
    if unconsumed:
        findings.append(
            Finding(
                Level.PROBLEM,
                "coverage",
                f"{_listed(unconsumed)} has no consumer, but the others have.",
                "Look at the log of the source; keyshard status shows its topic partitions.",
            )
        )
    return findings or [Finding(Level.OK, "coverage", "Every slot of the ring has an owner.")]


def _frozen(found: Mapping[TopicPartition, SubscriptionState]) -> list[Finding]:
    frozen = [
        where
        for where, state in found.items()
        if state.blocked or any(consumer.blocked for consumer in state.consumers)
    ]
    if not frozen:
        return []
    return [
        Finding(
            Level.PROBLEM,
            "unacknowledged",
            f"{_listed(frozen)}: the broker delivers nothing more, because too many messages are "
            "unacknowledged.",
            "Find what does not acknowledge: keyshard status.",
        )
    ]


def _listed(things: Iterable[object]) -> str:
    texts = list(map(str, things))
    more = f" and {len(texts) - _NAMES_MAX} more" if len(texts) > _NAMES_MAX else ""
    return ", ".join(texts[:_NAMES_MAX]) + more
