"""Gathers the input of :mod:`keyshard.core.diagnosis`; changes nothing at the broker."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice

from keyshard.broker.admin.port import Admin
from keyshard.broker.connect import COMPILED_REMEDY, decoded_in_python, decoder_of
from keyshard.broker.port import Broker, PublishOptions
from keyshard.broker.retry import retry_until
from keyshard.config.source import SourceConfig
from keyshard.core.creation import create_or_correct
from keyshard.core.diagnosis import (
    BY_CLIENT,
    Finding,
    Level,
    Sample,
    States,
    judge_batching,
    judge_consumers,
    judge_deduplication,
    judge_faults,
    judge_fill,
    judge_limits,
    judge_orphans,
    judge_subscription,
    judge_termination,
    judge_version,
    may_not_ask,
)
from keyshard.core.load_diagnosis import Load, judge_load
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.refused_limits import ConsumerLimits
from keyshard.core.releases import release_of
from keyshard.core.segment_diagnosis import (
    equal_segments,
    judge_registration,
    judge_segments,
    unregister,
)
from keyshard.core.subscription_state import BrokerLimits, CursorState, SubscriptionState
from keyshard.errors import (
    AuthorizationError,
    ChunkedMessageError,
    KeyShardError,
    TopicNotFoundError,
    UnreadableEntryError,
)
from keyshard.reading.scan import Scan

SAMPLE_ENTRIES = 200
"""Maximum number of examined entries of a topic partition; the newest ones are examined."""
SAMPLE_PARTITIONS = 8
"""Maximum number of topic partitions whose entries are examined."""
SAMPLE_S = 10.0
"""Longest time to examine entries, seconds."""
_Stored = Mapping[TopicPartition, CursorState | None]
"""Ledgers of each topic partition."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Load to compare the limits with."""

    rate_per_s: float
    """Messages per second, over all topic partitions."""
    message_bytes: float | None = None
    """Payload of one message, bytes; ``None``: the mean of the sample."""


def examine(
    config: SourceConfig,
    connect: Callable[[], Broker],
    admin: Admin,
    expected: Expected | None = None,
) -> list[Finding]:
    """Examine the topic and the subscription of a source, without consuming anything.

    Of a scalable topic, brokers report less; a finding names the rest.

    Args:
        config: Options of the source; only its first topic is examined.
        connect: Makes the connection to the broker; pulsar-client cannot check entries.
        admin: Admin REST interface.
        expected: Load to compare the limits with; ``None``: no comparison.

    Returns:
        Findings; a check that failed is a finding too.
    """
    if config.is_scalable:
        return _examine_scalable(config, connect, admin, expected)
    topic = config.topics[0]
    findings = _transport(config)
    try:
        version = admin.version()
        findings.append(judge_version(version))
        findings += judge_faults(version)
        partitions = _partitions(admin, topic)
        limits, consumer_limits, unknown = _limits(admin, topic, version)
        findings += unknown
        states = _states(admin, partitions)
        stored = _stored(admin, partitions)
    except KeyShardError as exc:
        return [*findings, Finding(Level.PROBLEM, "broker", exc.message)]
    findings += judge_subscription(states, config.subscription)
    findings += judge_consumers(states, config.subscription, config.parallelism, consumer_limits)
    findings += judge_fill(states, config.subscription, limits)
    findings += judge_orphans(states, config.subscription)
    findings += judge_termination(_terminated(stored), len(partitions))
    sample = Sample()
    unreadable: dict[EntryId, UnreadableEntryError] = {}
    try:
        broker = connect()
        try:
            _look_into(broker, stored, sample, unreadable)
        finally:
            broker.close()
        findings += judge_batching(sample)
        findings += _unreadable(unreadable, by_client=config.how_to_connect().by_client)
    except ChunkedMessageError as exc:
        findings.append(Finding(Level.PROBLEM, "batching", exc.message))
    except KeyShardError as exc:
        findings.append(Finding(Level.PROBLEM, "broker", exc.message))
    if expected is not None:
        mean = sample.message_bytes / sample.messages if sample.messages else None
        load = Load(
            expected.rate_per_s,
            mean if expected.message_bytes is None else expected.message_bytes,
            sample.messages_per_entry,
            len(partitions),
            config.parallelism,
            config.window_rows_max,
            config.window_bytes_max,
        )
        findings += judge_load(load, limits)
    return findings


def _examine_scalable(
    config: SourceConfig, connect: Callable[[], Broker], admin: Admin, expected: Expected | None
) -> list[Finding]:
    topic, subscription = config.topics[0], config.subscription
    findings = _transport(config)
    try:
        version = admin.version()
        findings.append(judge_version(version))
        findings += judge_faults(version)
        with closing(connect()) as broker:
            graph = broker.watch_segments(topic, lambda: None).graph
        limits, consumer_limits, unknown = _limits(admin, topic, version)
        findings += unknown
        states = _states(admin, graph.partitions)
        retention_min = admin.retention_min(topic)
    except KeyShardError as exc:
        return [*findings, Finding(Level.PROBLEM, "broker", exc.message)]
    findings += judge_segments(graph)
    findings += judge_subscription(states, subscription)
    findings += judge_registration(graph, states, subscription, retention_min)
    # A segment needs one consumer at least; the broker itself refuses further ones.
    findings += judge_consumers(states, subscription, 1, consumer_limits)
    if expected is not None:
        # Keys are spread evenly over hashes. Each message counts as an entry.
        load = Load(
            expected.rate_per_s, expected.message_bytes, 1.0, equal_segments(graph), 1,
            config.window_rows_max, config.window_bytes_max, has_replay_queue=False,
        )  # fmt: skip
        findings += judge_load(load, limits)
    return findings + judge_orphans(states, subscription, unregister(topic, "SUBSCRIPTION"))


def _transport(config: SourceConfig) -> list[Finding]:
    """Return the finding about the transport or the decoder of this process.

    With transport ``client``, it names the guarantees that pulsar-client lacks. With transport
    ``wire``, it names the decoder. With any other transport, there is none.
    """
    if config.how_to_connect().by_client:
        return [BY_CLIENT]
    decoder = decoder_of(config.how_to_connect())
    if decoder is None:
        return []
    if decoder == "python":
        return [Finding(Level.WARNING, "decoder", decoded_in_python(), COMPILED_REMEDY)]
    return [Finding(Level.OK, "decoder", "Compiled code decodes entries.")]


def examine_sink(topic: str, connect: Callable[[], Broker], admin: Admin) -> list[Finding]:
    """Examine a topic that a sink writes to, without publishing anything.

    Args:
        topic: Full name of the topic.
        connect: Makes the connection to the broker.
        admin: Admin REST interface.

    Returns:
        Findings; a check that failed is a finding too.
    """
    findings: list[Finding] = []
    try:
        version = admin.version()
        findings.append(judge_version(version))
        findings += judge_faults(version, of_sinks=True)
        broker = connect()
        try:
            if broker.missing([topic]):
                raise TopicNotFoundError(f"{topic} does not exist.", create_or_correct(topic))
            partitions = broker.partitions(topic)
            findings.append(
                Finding(Level.OK, "topic", f"{topic} has {len(partitions)} topic partition(s).")
            )
            ended = _terminated(_stored(admin, partitions))
            findings += judge_termination(ended, len(partitions), of_sink=True)
            broker.entry_producer(partitions[0], PublishOptions()).close()
            findings.append(Finding(Level.OK, "permission", "The broker accepts a producer."))
        finally:
            broker.close()
    except KeyShardError as exc:
        findings.append(Finding(Level.PROBLEM, "broker", exc.message))
    return findings + _deduplication(admin, topic)


def _deduplication(admin: Admin, topic: str) -> list[Finding]:
    """Judge the deduplication of a topic. Each of two requests may fail without the other."""
    failed: list[Finding] = []

    def answer(ask: Callable[[str], bool | None], otherwise: bool | None) -> bool | None:
        try:
            return ask(topic)
        except AuthorizationError:
            return None
        except KeyShardError as exc:
            failed.append(Finding(Level.PROBLEM, "deduplication", exc.message))
            return otherwise

    enabled = answer(admin.deduplicates, None)
    is_unknown = bool(failed)
    by_topic = answer(admin.deduplicates_by_topic, otherwise=False)
    if is_unknown and not by_topic:
        return failed
    return [judge_deduplication(topic, enabled=enabled, by_topic=by_topic), *failed]


def _limits(
    admin: Admin, topic: str, version: str
) -> tuple[BrokerLimits, ConsumerLimits, list[Finding]]:
    """Return the limits of the broker and of the topic, and those that the role may not read."""
    limits = release_of(version).limits.with_settings(admin.settings())
    findings = judge_limits(limits, version)
    policies = "topic limits", f"the policies of {topic}"
    try:
        limits = limits.with_unacknowledged(*admin.unacknowledged_limits(topic))
    except AuthorizationError:
        taken = "For unacknowledged messages, the limits of the broker are taken."
        findings.append(may_not_ask(*policies, taken))
    refused = "consumer limits", "the configuration of the broker"
    try:
        of_consumers = ConsumerLimits(*admin.consumer_limits(topic))
    except AuthorizationError:
        of_consumers, refused = ConsumerLimits(None, None), policies
    if of_consumers.unknown:
        unchecked = f"Whether consumers exceed {' or '.join(of_consumers.unknown)} is not checked."
        findings.append(may_not_ask(*refused, unchecked))
    return limits, of_consumers, findings


def _partitions(admin: Admin, topic: str) -> list[TopicPartition]:
    count = admin.partition_count(topic)
    if count is None:
        raise TopicNotFoundError(f"{topic} does not exist.", create_or_correct(topic))
    return [TopicPartition(topic, i) for i in range(count)] or [TopicPartition(topic)]


def _states(admin: Admin, partitions: Sequence[TopicPartition]) -> States:
    return {
        where: {
            name: SubscriptionState.from_stats(stats)
            for name, stats in admin.subscriptions(where).items()
        }
        for where in partitions
    }


def _stored(admin: Admin, partitions: Sequence[TopicPartition]) -> _Stored:
    return {where: admin.broker_state(where, "") for where in partitions}


def _terminated(stored: _Stored) -> list[TopicPartition]:
    """Return the topic partitions to which nothing can be published any more."""
    return [where for where, state in stored.items() if state is not None and state.terminated]


def _unreadable(found: Mapping[EntryId, UnreadableEntryError], *, by_client: bool) -> list[Finding]:
    """Name entries that cannot be read; they end a source unless it skips them."""
    if not found:
        return []
    text = (
        f"{len(found)} of the newest entries cannot be read. {next(iter(found.values())).message}"
    )
    advice = (
        "Set transport to wire. pulsar-client checks no entry: it may deliver empty messages, skip "
        "the entry, or end the process."
    )
    return [Finding(Level.PROBLEM, "unreadable", text, advice if by_client else "")]


def _look_into(
    broker: Broker,
    stored: _Stored,
    sample: Sample,
    unreadable: dict[EntryId, UnreadableEntryError],
) -> None:
    """Read the newest entries of some topic partitions, evenly spread over all."""
    deadline = time.monotonic() + SAMPLE_S
    step = max(1, -(-len(stored) // SAMPLE_PARTITIONS))
    for where, state in islice(stored.items(), 0, None, step):
        ledgers = [item for item in (state.ledgers if state else {}).items() if item[1]]
        if not ledgers:
            continue
        ledger, entries = ledgers[-1]
        start = EntryId(ledger, max(0, entries - SAMPLE_ENTRIES))
        left = SAMPLE_ENTRIES
        with Scan(broker, where, start, None, unreadable=unreadable) as scan:
            while left > 0 and not scan.done and (left_s := deadline - time.monotonic()) > 0:
                for block in retry_until(scan.read, left_s):
                    sample.add(where, block)
                    left -= 1
