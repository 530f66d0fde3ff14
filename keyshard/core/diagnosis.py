"""Checks of a topic, a subscription or a load, before or while a source runs.

Each check is a function from facts to findings. ``keyshard doctor`` gathers the facts
(:mod:`keyshard.observe.doctor`) and prints the findings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition, namespace_of
from keyshard.core.refused_limits import ConsumerLimits
from keyshard.core.releases import LINES, TESTED, Fault, Version, faults_of
from keyshard.core.subscription_state import BrokerLimits, SubscriptionState
from keyshard.core.topic_segments import SCALABLE
from keyshard.redaction import listed

States = Mapping[TopicPartition, Mapping[str, SubscriptionState]]
"""Every subscription of each topic partition, by name."""
NEAR = 0.5
"""Fraction of a limit that causes a warning."""
_NAMES_MAX = 3


class Level(str, Enum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    level: Level
    about: str
    """Subject of the check, in a word or two."""
    text: str
    advice: str = ""
    """Remedy; empty if none is needed."""


BY_CLIENT = Finding(
    Level.WARNING,
    "transport",
    "pulsar-client consumes and reads (transport client). It lacks guarantees of the transport "
    "wire: a frozen broker is named within 10 s and delays nothing else, queues have a limit in "
    "bytes, and every kind of damaged entry is an error.",
    "Leave transport out, unless only pulsar-client reaches this cluster. docs/semantics.md lists "
    "the differences.",
)


class Sample:
    """Facts about the producers of a topic, from some stored entries."""

    def __init__(self) -> None:
        self.entries = 0
        self.messages = 0
        self.batches = 0
        """Entries with several messages."""
        self.mixed = 0
        """Entries whose messages have different slots: their producer does not batch by key."""
        self.keyless = 0
        """Messages without a key."""
        self.message_bytes = 0
        """Size of values, keys and properties of all messages, bytes."""
        self._last: tuple[TopicPartition, EntryId] | None = None
        self._last_mixed = False
        self._last_slot: int | None = None

    def add(self, where: TopicPartition, block: EntryBlock) -> None:
        """Count a block. The blocks of one entry must follow one another."""
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
        """Mean number; 1 without entries."""
        return self.messages / self.entries if self.entries else 1.0


def judge_version(version: str) -> Finding:
    """Check the broker's release."""
    about = "broker version"
    found = Version.of(version)
    if found is None:
        return Finding(
            Level.WARNING,
            about,
            f"The broker reports the unknown version {version!r}.",
            "Check that service_url and admin_url belong to a Pulsar broker.",
        )
    oldest = ".".join(map(str, LINES[0]))
    if found.line < LINES[0]:
        return Finding(
            Level.WARNING,
            about,
            f"Pulsar {version} is older than {oldest}, the oldest version that keyshard is tested "
            "with. Ranges that joined earlier may delay a range that joins (apache/pulsar#23271).",
            f"Use Pulsar {oldest} or newer.",
        )
    tested = ", ".join(TESTED[:-1])
    return Finding(
        Level.OK, about, f"Pulsar {version}. keyshard is tested with {tested} and {TESTED[-1]}."
    )


def judge_limits(limits: BrokerLimits, version: str) -> list[Finding]:
    """Say that the limits of the broker are unknown; nothing is said of known ones."""
    if not limits.assumed:
        return []
    assumed = f"The default limits of Pulsar {version} are assumed."
    return [may_not_ask("broker limits", "the configuration of the broker", assumed)]


def judge_faults(version: str, *, of_sinks: bool = False) -> list[Finding]:
    """Name the known faults of the broker's release, those of sources or those of sinks."""
    return [_known(fault) for fault in faults_of(version, of_sinks=of_sinks)]


def _known(fault: Fault) -> Finding:
    mended = ", ".join(map(str, fault.mended))
    upgrade = f"Mended in {mended}." if mended else "No release has mended it."
    return Finding(
        Level.WARNING,
        "known fault",
        f"{fault.text} ({fault.source})",
        f"{upgrade} {fault.remedy}".rstrip(),
    )


def may_not_ask(about: str, asked: str, consequence: str) -> Finding:
    """Return the finding that a check had no answer, because the role lacks a permission.

    Args:
        about: Subject of the check.
        asked: The facts that the role may not read.
        consequence: A sentence.
    """
    text = f"unknown: the role may not read {asked}. {consequence}"
    return Finding(Level.WARNING, about, text, "Check with the role of an administrator.")


def judge_deduplication(topic: str, *, enabled: bool | None, by_topic: bool | None) -> Finding:
    """Check that a broker stores the rows of a sink once.

    Args:
        topic: Full name of the topic.
        enabled: Whether the broker deduplicates the topic; ``None`` if that is unknown.
        by_topic: Whether a policy of the topic itself says so; ``None`` if that is unknown.
    """
    about = "deduplication"
    command = f"pulsar-admin namespaces set-deduplication {namespace_of(topic)} --enable"
    if enabled is None and not by_topic:
        return may_not_ask(
            about,
            f"whether the broker deduplicates {topic}",
            "A sink checks it by its first entry.",
        )
    if enabled is False:
        return Finding(
            Level.PROBLEM,
            about,
            f"Deduplication is disabled for {topic}, so a sink refuses to write exactly once.",
            f"Enable it: {command}. Or write with the guarantee at-least-once.",
        )
    if by_topic:
        return Finding(
            Level.WARNING,
            about,
            f"A policy of {topic} itself enables deduplication. Pulsar before 5.0 may know too few "
            "stored rows after it has loaded such a topic (apache/pulsar#25953), so a sink reads "
            "the end of the topic before it repeats a batch.",
            f"Use Pulsar 5.0, or a topic that never had a policy, and enable it for the namespace: "
            f"{command}",
        )
    deduplicates = f"The broker deduplicates {topic}."
    if by_topic is None:
        return may_not_ask(
            about, f"whether a policy of {topic} itself enables deduplication", deduplicates
        )
    return Finding(Level.OK, about, deduplicates)


def judge_batching(sample: Sample) -> list[Finding]:
    """Check how the sampled messages are batched, and whether they have keys."""
    about = "batching"
    seen = f"{sample.messages} messages in {sample.entries} entries were sampled"
    if not sample.entries:
        return [
            Finding(
                Level.WARNING,
                about,
                "The topic is empty, so the batching of its producers is unknown.",
                "Publish a few messages, and run this command again.",
            )
        ]
    findings = []
    if sample.mixed:
        findings.append(
            Finding(
                Level.PROBLEM,
                about,
                f"default: {sample.mixed} of {sample.batches} batches mix keys ({seen}). The "
                "broker routes a batch by its first key, so the order of the other keys is lost.",
                "Enable batching by key at every producer (BatchingType.KeyBased; in Java, "
                "BatcherBuilder.KEY_BASED), or disable batching.",
            )
        )
    else:
        kind = f"by key: {sample.batches} batches with one key each" if sample.batches else "none"
        findings.append(Finding(Level.OK, about, f"{kind} ({seen})."))
    if sample.keyless:
        findings.append(
            Finding(
                Level.WARNING,
                "keys",
                f"{sample.keyless} of {sample.messages} messages have no key. Such messages have "
                "no order, and go to any range.",
                "If their order matters, give them a key. Otherwise set null_keys.",
            )
        )
    return findings


def judge_subscription(states: States, subscription: str) -> list[Finding]:
    """Check type, policy and coverage of a subscription."""
    about = "subscription"
    found = {
        where: all_of[subscription] for where, all_of in states.items() if subscription in all_of
    }
    if not found:
        text = f"{subscription!r} does not exist yet. The first start creates it."
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
        text = f"{subscription!r} has {consumers} consumers and a backlog of {backlog} entries."
        findings.insert(0, Finding(Level.OK, about, text))
    return findings


def judge_orphans(
    states: States, subscription: str, delete: str = "pulsar-admin topics unsubscribe"
) -> list[Finding]:
    """Find other subscriptions that retain data and have no consumer.

    Args:
        states: Every subscription of each topic partition.
        subscription: Subscription of the source.
        delete: Command that deletes another one.
    """
    backlogs: dict[str, int] = {}
    for all_of in states.values():
        for name, state in all_of.items():
            if name != subscription and state.durable and not state.consumers:
                backlogs[name] = backlogs.get(name, 0) + state.backlog
    orphans = {name: backlog for name, backlog in backlogs.items() if backlog}
    if not orphans:
        return [
            Finding(Level.OK, "orphans", "No other subscription retains data without a consumer.")
        ]
    listed = ", ".join(f"{name!r} ({count} entries)" for name, count in sorted(orphans.items()))
    return [
        Finding(
            Level.WARNING,
            "orphans",
            f"The subscriptions {listed} have no consumer. The broker retains every entry that "
            "they have not acknowledged.",
            f"Delete the unused subscriptions: {delete}.",
        )
    ]


def judge_consumers(
    states: States, subscription: str, parallelism: int, limits: ConsumerLimits
) -> list[Finding]:
    """Check that the broker has room for the consumers of a source beside those of others."""
    for where, all_of in states.items():
        others = {
            name: len(state.consumers) for name, state in all_of.items() if name != subscription
        }
        found = limits.exceeded(parallelism, subscription, others)
        if found is not None:
            limit, most = found
            text = (
                f"The broker allows {most} consumers of {where} ({limit.setting}). The source "
                f"needs {parallelism}, and other subscriptions have {sum(others.values())}."
            )
            advice = f"{limit.fewer}, or {limit.remedy(namespace_of(where.topic))}."
            return [Finding(Level.PROBLEM, "consumers", text, advice)]
    return []


def judge_termination(
    terminated: Sequence[TopicPartition], partitions: int, *, of_sink: bool = False
) -> list[Finding]:
    """Name topic partitions that are terminated; nothing is said of others.

    Args:
        terminated: Those topic partitions.
        partitions: Number of all topic partitions of the topic.
        of_sink: Whether a sink writes to the topic.
    """
    if not terminated:
        return []
    named = ", ".join(where.name for where in terminated[:_NAMES_MAX])
    more = ", ..." if len(terminated) > _NAMES_MAX else ""
    text = f"{len(terminated)} of {partitions} topic partition(s) are terminated: {named}{more}."
    end = "Termination cannot be undone: pulsar-admin topics terminate ends a topic for good."
    if of_sink:
        advice = f"{end} Write to another topic."
        return [Finding(Level.PROBLEM, "termination", f"{text} A sink cannot write there.", advice)]
    text = f"{text} Stored messages can be read, and none is added: reads end there."
    scalable = SCALABLE + terminated[0].topic.partition("://")[2]
    advice = f"{end} Read new messages from another topic; if it was migrated, from {scalable}."
    return [Finding(Level.WARNING, "termination", text, advice)]


def judge_fill(states: States, subscription: str, limits: BrokerLimits) -> list[Finding]:
    """Check replay queue and ack gaps of a subscription against the broker's limits."""
    findings = []
    for where, all_of in states.items():
        state = all_of.get(subscription)
        if state is None:
            continue
        replay_max = limits.replay(len(state.consumers))
        in_replay = state.in_replay or 0
        if replay_max and in_replay >= NEAR * replay_max:
            findings.append(
                Finding(
                    Level.PROBLEM if in_replay >= replay_max else Level.WARNING,
                    "replay queue",
                    f"{in_replay} of {replay_max} entries of {where} wait for a range that "
                    "does not receive them. At the limit, the broker stops all ranges.",
                    "Find the slow or missing range with keyshard status.",
                )
            )
        if limits.ack_gaps and (state.ack_gaps or 0) >= NEAR * limits.ack_gaps:
            findings.append(
                Finding(
                    Level.WARNING,
                    "ack gaps",
                    f"{where} has {state.ack_gaps} of {limits.ack_gaps} ack gaps. After a "
                    "restart of the broker, entries beyond the limit are delivered again.",
                    "Find the slow range with keyshard status, or raise "
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
        elif state.consumers and state.sticky is False:
            reason = "splits the ring automatically (AUTO_SPLIT)"
        elif state.consumers and state.out_of_order:
            reason = "allows out-of-order delivery of a key"
        if reason:
            clashing.setdefault((reason, bool(state.consumers)), []).append(where)
    findings = []
    for (reason, in_use), places in clashing.items():
        on = f"{subscription!r} {reason} on {listed(places)}"
        if in_use:
            findings.append(
                Finding(
                    Level.PROBLEM,
                    "subscription",
                    f"{on}, and has connected consumers. The broker rejects keyshard, whose type "
                    "is Key_Shared with sticky ranges.",
                    "Stop those consumers, or give keyshard its own subscription.",
                )
            )
        else:
            findings.append(
                Finding(
                    Level.WARNING,
                    "subscription",
                    f"{on}, and has no connected consumer. keyshard can use it, with its backlog.",
                    "Make sure that its old consumers do not reconnect.",
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
            f"{subscription!r} does not exist on {listed(missing)}, but exists on the other "
            "topic partitions.",
            "Start the source. It creates the missing subscriptions, which begin at the "
            "earliest entry.",
        )
    ]


def _coverage(found: Mapping[TopicPartition, SubscriptionState]) -> list[Finding]:
    consumed = {
        where: state
        for where, state in found.items()
        if state.consumers and state.kind == "Key_Shared" and state.sticky is not False
    }
    if not consumed:
        return []
    # Of segments, the broker does not report the ranges of consumers.
    sticky = {where: state for where, state in consumed.items() if state.sticky}
    uncovered = {where: state.gaps for where, state in sticky.items() if state.gaps}
    unconsumed = [where for where, state in found.items() if not state.consumers]
    findings = [
        Finding(
            Level.PROBLEM,
            "coverage",
            f"The slots {listed(ranges)} of {where} have no consumer. Their messages wait, "
            "until the broker stops all ranges of the topic partition.",
            "Start the source that owns them. One source owns the whole ring.",
        )
        for where, ranges in uncovered.items()
    ]
    if unconsumed:
        findings.append(
            Finding(
                Level.PROBLEM,
                "coverage",
                f"{listed(unconsumed)} has no consumer, but the other topic partitions have "
                "consumers.",
                "Check the log of the source, and its topic partitions with keyshard status.",
            )
        )
    text = "Every slot of the ring has a consumer." if sticky else "Every segment has a consumer."
    return findings or [Finding(Level.OK, "coverage", text)]


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
            f"{listed(frozen)}: too many messages are unacknowledged, so the broker delivers "
            "nothing.",
            "Find the range that does not acknowledge with keyshard status.",
        )
    ]
