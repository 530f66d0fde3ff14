"""Limits of the broker and of the source under an expected load."""

from __future__ import annotations

from dataclasses import dataclass

from keyshard.core.diagnosis import Finding, Level
from keyshard.core.position.entry import ENTRY_BYTES, ROW_BYTES
from keyshard.core.subscription_state import BrokerLimits

ENTRIES_PER_S_MAX = 10_000
"""Entries per second that one topic partition delivers with a broker's default settings."""
SHORT_S = 30.0
"""A limit that is reached in less time causes a warning, seconds; see :func:`judge_load`."""


@dataclass(frozen=True, slots=True)
class Load:
    """The expected load of a source."""

    rate_per_s: float
    """Messages per second, over all topic partitions."""
    message_bytes: float | None
    """Payload of one message; ``None`` if it is unknown."""
    messages_per_entry: float
    partitions: int
    parallelism: int
    """Number of ranges."""
    window_rows_max: int
    window_bytes_max: int
    has_replay_queue: bool = True
    """Whether entries for other consumers wait behind those of a consumer that stops."""

    @property
    def memory_bytes(self) -> float | None:
        """Bytes that the window counts for one message; ``None`` if they are unknown."""
        if self.message_bytes is None:
            return None
        return self.message_bytes + ROW_BYTES + ENTRY_BYTES / self.messages_per_entry


_UNKNOWN_SIZE = Finding(
    Level.WARNING,
    "message size",
    "unknown: no message was sampled. The limits in bytes are not checked, and each message counts "
    "as an entry.",
    "Add --message-bytes, or publish a few messages.",
)


def judge_load(load: Load, limits: BrokerLimits) -> list[Finding]:
    """Check a load against the limits of the broker and of the source.

    Some limits are reached only if no batch is committed, or if one range stops. For these, the
    time from that moment to the limit decides.
    """
    findings = []
    if limits.message_bytes and (load.message_bytes or 0) > limits.message_bytes:
        findings.append(
            Finding(
                Level.PROBLEM,
                "message size",
                f"Messages of {load.message_bytes:,.0f} bytes exceed the broker's limit of "
                f"{limits.message_bytes:,}. keyshard rejects chunked messages.",
                "Make the messages smaller, or raise maxMessageSize.",
            )
        )
    entries_per_s = load.rate_per_s / load.messages_per_entry / load.partitions
    if entries_per_s > ENTRIES_PER_S_MAX:
        findings.append(
            Finding(
                Level.WARNING,
                "entries per second",
                f"The load is {entries_per_s:,.0f} entries per second in each topic partition. A "
                f"broker with default settings delivers about {ENTRIES_PER_S_MAX:,}.",
                "Batch by key, so that an entry contains more messages, or use more partitions.",
            )
        )
    soon = [reach for reach in _reaches(load, limits) if reach.seconds < SHORT_S]
    findings += [
        Finding(Level.WARNING, reach.about, f"{reach.text} {reach.seconds:.1f} s.", reach.advice)
        for reach in soon
    ]
    if not findings:
        first = min(_reaches(load, limits), key=lambda reach: reach.seconds)
        text = (
            f"The first limit at {load.rate_per_s:,.0f} messages/s: {first.text} "
            f"{first.seconds:,.0f} s."
        )
        findings.append(Finding(Level.OK, "limits", text))
    return findings if load.message_bytes is not None else [*findings, _UNKNOWN_SIZE]


@dataclass(frozen=True, slots=True)
class _Reach:
    about: str
    seconds: float
    text: str
    advice: str


def _reaches(load: Load, limits: BrokerLimits) -> list[_Reach]:
    """Return the time until the load reaches each limit, once commits or a range stop."""
    per_partition = load.rate_per_s / load.partitions
    per_consumer = per_partition / load.parallelism
    entries_per_consumer = per_consumer / load.messages_per_entry
    stop = "If no batch is committed,"
    lag = "If one range stops,"
    wider = "Commit more often, raise the limit, or use more partitions."
    reaches = [
        _Reach(
            "window", load.window_rows_max / load.rate_per_s,
            f"{stop} the window of {load.window_rows_max:,} rows is full after",
            "Raise window_rows_max.",
        ),
    ]  # fmt: skip
    if load.memory_bytes is not None:
        text = f"{stop} the window of {load.window_bytes_max:,} bytes is full after"
        seconds = load.window_bytes_max / (load.rate_per_s * load.memory_bytes)
        reaches.append(_Reach("window", seconds, text, "Raise window_bytes_max."))
    replay_max = limits.replay(load.parallelism)
    if replay_max and load.has_replay_queue:
        text = (
            f"{lag} the broker stops all ranges of a topic partition, with {replay_max:,} entries "
            "waiting, after"
        )
        advice = "Raise keySharedLookAheadMsgInReplayThresholdPerConsumer and ...PerSubscription."
        reaches.append(_Reach("replay queue", replay_max / entries_per_consumer, text, advice))
    if limits.ack_gaps:
        text = f"{lag} a topic partition exceeds {limits.ack_gaps:,} ack gaps after"
        advice = "Raise managedLedgerMaxUnackedRangesToPersist."
        reaches.append(_Reach("ack gaps", limits.ack_gaps / entries_per_consumer, text, advice))
    if limits.unacked_per_consumer:
        text = f"{stop} a range has {limits.unacked_per_consumer:,} unacknowledged messages after"
        seconds = limits.unacked_per_consumer / per_consumer
        reaches.append(_Reach("unacknowledged", seconds, text, wider))
    if limits.unacked_per_subscription:
        text = (
            f"{stop} a topic partition has {limits.unacked_per_subscription:,} unacknowledged "
            "messages after"
        )
        seconds = limits.unacked_per_subscription / per_partition
        reaches.append(_Reach("unacknowledged", seconds, text, wider))
    return reaches
