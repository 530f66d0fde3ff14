"""Releases of Pulsar: their differences, and their known faults.

The in-memory broker imitates the release that it is configured with. The contract tests expect the
behaviour of that release. ``keyshard doctor`` names the faults of a broker. The sources are
Pulsar's release notes, the code of 4.0.8, 4.2.4 and 5.0.1, and tests with these three.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from keyshard.core.subscription_state import BrokerLimits

TESTED = ("4.0.8", "4.2.4", "5.0.1")
"""Releases that keyshard is tested with."""
DEFAULT_VERSION = TESTED[-1]
"""Release of the brokers that keyshard starts, and that the in-memory broker behaves like."""


class Version(NamedTuple):
    """Version of a release."""

    major: int
    minor: int
    patch: int = 0

    @classmethod
    def of(cls, text: str) -> Version | None:
        """Parse a version such as ``4.0.8`` or ``5.0.1-SNAPSHOT``; ``None`` if it is not one."""
        match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
        return None if match is None else cls(*(int(part or 0) for part in match.groups()))

    @property
    def line(self) -> tuple[int, int]:
        """Major and minor version, which its patch releases share."""
        return self.major, self.minor

    def __str__(self) -> str:
        return ".".join(map(str, self))


LINES = ((4, 0), (4, 2), (5, 0))
"""Lines that get patch releases, ascending."""


@dataclass(frozen=True, slots=True)
class Span:
    """Releases of one line from ``first`` on.

    A span of the newest known line without an end also has the releases of all later lines.
    """

    first: Version
    end: Version | None = None
    """The first later release of the line outside the span; ``None``: there is none."""

    def has(self, version: Version) -> bool:
        """Return whether a release belongs to it."""
        if self.end is not None:
            return self.first <= version < self.end
        is_newest = self.first.line == LINES[-1]
        return self.first <= version and (is_newest or version.line == self.first.line)


def _version(text: str) -> Version:
    found = Version.of(text)
    assert found is not None
    return found


def _from(*firsts: str) -> tuple[Span, ...]:
    """Return the given releases and the later ones of their lines."""
    return tuple(Span(_version(first)) for first in firsts)


def _until(*ends: str) -> tuple[Span, ...]:
    """Return the releases before the given ones of their lines, and all of 4.1."""
    return (*_from("4.1.0"), *(Span(Version(*end.line), end) for end in map(_version, ends)))


# -- Differences -----------------------------------------------------------------------------------

_ACKNOWLEDGED_WAIT = _from("4.0.11", "4.2.2", "5.0.0")


@dataclass(frozen=True, slots=True)
class Release:
    """Behaviour in which brokers differ; by default, that of Pulsar 4.0.8."""

    limits: BrokerLimits = field(default_factory=BrokerLimits)
    """Default limits."""
    acknowledged_wait: bool = False
    """Whether an acknowledged entry stays in the replay queue until its consumer could get it.
    Meanwhile it counts towards the look-ahead limit (apache/pulsar#25592)."""
    partitions_need_topic: bool = False
    """Whether the broker refuses a partition of a topic that was deleted. Otherwise a consumer
    that reconnects creates it again (apache/pulsar#24118)."""
    zero_is_before_all: bool = False
    """Whether the position at time 0 is ``-1:-1``, and not the first entry
    (apache/pulsar#24523)."""
    blocked_until_half: bool = False
    """Whether a consumer at its limit of unacknowledged messages may get nothing until half of
    them are acknowledged, also beside another consumer."""
    negative_batch_undelivered: bool = False
    """Whether the broker delivers neither an entry with a negative number of messages nor the
    entries that it reads together with it (apache/pulsar#26030)."""
    knows_every_id: bool = False
    """Whether the broker, once it has loaded a topic, knows every sequence id that is stored there.
    Otherwise it may know too few of them, and store a message twice (apache/pulsar#25953)."""
    first_delayed_waits: bool = False
    """Whether the first message with a delivery time comes after later messages of its key, even
    if its time has passed: the broker first creates its tracker of delayed messages."""


def release_of(version: str) -> Release:
    """Return the behaviour of a release; an unknown one behaves like the newest known one."""
    found = Version.of(version) or Version(*LINES[-1])
    newer = found.line >= (4, 1)
    newest = found.line >= (5, 0)
    waits = any(span.has(found) for span in _ACKNOWLEDGED_WAIT)
    limits = BrokerLimits()
    if newest:
        limits = BrokerLimits(
            replay_per_consumer=4_000, replay_per_subscription=40_000, ack_gaps=200_000
        )
    return Release(
        limits=limits,
        acknowledged_wait=waits,
        partitions_need_topic=newer,
        zero_is_before_all=newer,
        blocked_until_half=waits,
        negative_batch_undelivered=newest,
        knows_every_id=newest,
        first_delayed_waits=newest,
    )


def knows_every_id(server: str) -> bool:
    """Return :attr:`Release.knows_every_id` of a broker, by its greeting.

    Args:
        server: The field ``server_version`` of ``CommandConnected``: ``Pulsar Server4.2.4``. Pulsar
            4.0 leaves the version out.
    """
    found = re.search(r"\d+\.\d+.*", server)
    return found is not None and release_of(found.group()).knows_every_id


_NO_PARTITION = ("Partition metadata not found", "Illegal topic partition name")


def denies_partition(text: str) -> bool:
    """Return whether a broker's text says that a topic, which may be gone, lacks a partition."""
    return text.startswith(_NO_PARTITION)


# -- Known faults ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of some releases that keyshard cannot fix."""

    text: str
    """Its effect, as a sentence."""
    source: str
    """Issue or pull request, or how it is known."""
    spans: tuple[Span, ...]
    """Releases that have it."""
    of_sinks: bool = False
    """Whether it concerns producers; otherwise, it concerns consumers and readers."""
    remedy: str = ""
    """Remedy for the releases that have it; empty if there is none."""

    def is_in(self, version: Version) -> bool:
        """Return whether a release has it."""
        return any(span.has(version) for span in self.spans)

    @property
    def mended(self) -> tuple[Version, ...]:
        """The first release without the fault, for each line that has one."""
        ends = {span.first.line: span.end for span in self.spans}
        # A line after all lines with the fault counts as fixed from its first release on.
        newer = [line for line in LINES if line > max(ends)]
        found = [ends[line] for line in LINES if line in ends]
        return (*filter(None, found), *(Version(*line) for line in newer))


_NEVER_BEFORE_5 = _from("4.0.0", "4.1.0", "4.2.0")

FAULTS = (
    Fault(
        "A subscription without backlog may leave a message undelivered until something else "
        "happens: a new message, an acknowledgement or a receive.",
        "apache/pulsar#26236",
        _until("4.0.13", "4.2.4"),
    ),
    Fault(
        "While a range has no consumer, its acknowledged entries count towards the look-ahead "
        "limit. At the limit, all ranges of the topic partition stop.",
        "apache/pulsar#25592",
        _ACKNOWLEDGED_WAIT,
        remedy="Keep a consumer on every range: start the source again if it has stopped.",
    ),
    Fault(
        "A consumer that does not read from its connection holds up all others of its "
        "subscription.",
        "apache/pulsar#26635",
        _NEVER_BEFORE_5,
    ),
    Fault(
        "The count of unacknowledged messages of a consumer may stay too high. At its limit, the "
        "consumer gets no message any more.",
        "apache/pulsar#25581",
        _until("4.0.11", "4.2.2"),
    ),
    Fault(
        "Reconnects may cost a subscription permits, so that its messages come more slowly for "
        "good.",
        "apache/pulsar#26289",
        _until("4.0.14", "4.2.5"),
    ),
    Fault(
        "A time to live moves readers past stored messages. The transport wire reads them again; "
        "the transport client skips them silently.",
        "apache/pulsar#26504",
        _until("4.0.14", "4.2.5"),
        remedy="Set no time to live, or use transport wire.",
    ),
    Fault(
        "If a client acknowledges messages of a batch one by one, they may come again after the "
        "topic has moved to another broker. keyshard acknowledges whole entries.",
        "apache/pulsar#26474",
        _until("4.0.14", "4.2.5"),
    ),
    Fault(
        "The broker does not deliver an entry with a negative number of messages, nor the entries "
        "that it reads together with it. Once it has loaded the topic again, it may deliver "
        "nothing.",
        "apache/pulsar#26030",
        _from("5.0.0"),
    ),
    Fault(
        "The first message with a delivery time comes after later messages of its key, even if "
        "its time has passed.",
        "seen with 5.0.1",
        _from("5.0.0"),
    ),
    Fault(
        "If the topic has, or once had, a policy of its own, of any kind, the broker may not know "
        "all stored sequence ids once it has loaded the topic. It may then store a message twice. "
        "Sinks look for it in the topic; other producers with names do not.",
        "apache/pulsar#25953",
        _NEVER_BEFORE_5,
        of_sinks=True,
        remedy="Set policies for the namespace, and none for the topics of a sink.",
    ),
    Fault(
        "If the broker cannot read a cursor, it forgets the sequence ids of producers, and may "
        "store a message twice.",
        "apache/pulsar#26512",
        _until("4.0.14", "4.2.5"),
        of_sinks=True,
    ),
    Fault(
        "If a topic is closed while it opens its next ledger, a publish may stay unanswered.",
        "apache/pulsar#25240",
        _until("4.0.14", "4.2.5"),
        of_sinks=True,
    ),
)
"""Faults that lose, repeat, reorder or hold up messages that keyshard reads or writes."""


def faults_of(version: str, *, of_sinks: bool = False) -> list[Fault]:
    """Return the known faults of a release; an empty list for an unknown version.

    Args:
        version: Version of the broker, such as ``4.0.8``.
        of_sinks: Whether to return those for sinks; otherwise, those for sources.
    """
    found = Version.of(version)
    return [
        fault
        for fault in FAULTS
        if found is not None and fault.of_sinks is of_sinks and fault.is_in(found)
    ]
