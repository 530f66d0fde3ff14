"""Topics whose entries a broker sends to consumers and Readers within their permits."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar

from keyshard.core.ring.hash_range import HashRange
from tests.support.frame_broker.server import SocketSession
from tests.support.frame_broker.session import CONFLICT, NOT_READY, FrameSession, range_of

LEDGER = 7
"""Ledger of all entries."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a topic."""

    number: int
    slot: int
    data: bytes
    messages: int = 1
    """Messages that are still to be delivered; permits count them."""
    ack_set: tuple[int, ...] = ()


@dataclass(eq=False)
class Member:
    """A consumer or Reader, as its broker knows it."""

    session: FrameSession
    consumer_id: int
    topic: str
    hash_range: HashRange | None
    """``None``: a Reader, of all entries."""
    position: int
    """Index of the next entry in the log."""
    permits: int = 0
    parked: int = 0
    """Number of events of its topic until it is served again, although it has permits."""


@dataclass(eq=False)
class Topics:
    """Entries of topics that each have one subscription; called with :attr:`lock` held."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    logs: dict[str, list[Entry]] = field(default_factory=lambda: defaultdict(list))
    acked: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    members: dict[tuple[FrameSession, int], Member] = field(default_factory=dict)

    def log(self, topic: str) -> Sequence[Entry]:
        """Return the entries of a topic, in the order of their numbers."""
        return self.logs[topic]

    def join(self, member: Member) -> bool:
        """Add a consumer or Reader; return whether its range was free."""
        wanted = member.hash_range
        for one in self.members.values():
            held = one.hash_range
            if wanted is None or held is None or one.topic != member.topic:
                continue
            if held.start <= wanted.end and wanted.start <= held.end:
                return False
        self.members[member.session, member.consumer_id] = member
        return True

    def leave(self, session: FrameSession, consumer_id: int | None = None) -> None:
        """Forget a consumer or Reader of a session, or all of them."""
        for key in list(self.members):
            if key[0] is session and consumer_id in (None, key[1]):
                del self.members[key]

    def grant(self, member: Member, permits: int) -> None:
        """Let a member be sent more messages."""
        member.permits = int32(member.permits + permits)
        self.stir(member.topic)

    def acknowledge(self, member: Member, numbers: Iterable[int]) -> None:
        """Acknowledge entries of the topic of a member, whether or not they were sent."""
        self.acked[member.topic].update(numbers)

    def stir(self, topic: str) -> None:
        """Count an event of a topic, and send to its members what their permits allow."""
        for member in list(self.members.values()):
            if member.topic == topic:
                member.parked = max(0, member.parked - 1)
                self.dispatch(member)

    def dispatch(self, member: Member) -> None:
        """Send to a member what its permits allow."""
        log, acked = self.log(member.topic), self.acked[member.topic]
        while member.permits > 0 and member.position < len(log) and not member.parked:
            entry = log[member.position]
            member.position += 1
            if member.hash_range is None or (
                entry.slot in member.hash_range and entry.number not in acked
            ):
                self.deliver(member, entry)

    def deliver(self, member: Member, entry: Entry) -> None:
        """Send an entry to a member."""
        member.permits = int32(member.permits - entry.messages)
        member.session.deliver(member.consumer_id, LEDGER, entry.number, entry.data, entry.ack_set)


def int32(number: int) -> int:
    """Return a number as a broker counts it: in 32 bits, with wrap-around."""
    return (number + 2**31) % 2**32 - 2**31


class TopicSession(SocketSession):
    """A session of a broker that has topics; each command is handled with their lock held."""

    member_class: ClassVar[type[Member]] = Member

    @property
    def topics(self) -> Topics:
        topics: Topics = self.broker.topics
        return topics

    def cut(self) -> None:
        super().cut()
        with self.topics.lock:
            self.topics.leave(self)

    def ended(self) -> None:
        super().ended()
        with self.topics.lock:
            self.topics.leave(self)

    def handle(self, name: str, command: Any) -> None:
        with self.topics.lock:
            super().handle(name, command)

    def joins(self, asked: Any) -> bool:
        """Give a consumer its range, or refuse it; return whether the range was free."""
        topic, start = asked.topic.decode(), asked.start_message_id
        first = start.entry if start.ledger >= LEDGER else 0
        position = bisect_left(self.topics.log(topic), first, key=attrgetter("number"))
        free = self.topics.join(
            self.member_class(self, asked.consumer_id, topic, range_of(asked), position)
        )
        if not free:
            self.refuse(asked, CONFLICT)
        return free

    # -- one command each -------------------------------------------------------------------------

    def _subscribe(self, asked: Any) -> None:
        if self.joins(asked):
            self.succeed(asked)

    def _flow(self, given: Any) -> None:
        member = self.topics.members.get((self, given.consumer_id))
        if member is not None:
            self.topics.grant(member, given.permits)

    def _ack(self, given: Any) -> None:
        member = self.topics.members.get((self, given.consumer_id))
        if member is not None:
            self.topics.acknowledge(member, [one.entry for one in given.message_id])
            self.confirm(given)

    def _get_last_message_id(self, asked: Any) -> None:
        member = self.topics.members.get((self, asked.consumer_id))
        if member is None:
            self.refuse(asked, NOT_READY)
            return
        log = self.topics.log(member.topic)
        self.name_last(asked, LEDGER, log[-1].number if log else -1)

    def _close_consumer(self, asked: Any) -> None:
        self.topics.leave(self, asked.consumer_id)
        self.succeed(asked)
