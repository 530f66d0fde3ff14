"""The status of a running source, as plain JSON values, and where a key of it stands."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime, timezone

from keyshard.broker.connect import decoder_of, transport_of
from keyshard.config.source import SourceConfig
from keyshard.coordinator.coordinator import Coordinator
from keyshard.coordinator.rescale import Rescaler
from keyshard.core.dead_letter.letters import Letter
from keyshard.core.dead_letter.selection import Selection
from keyshard.core.health import KeyFacts, RangeFacts, Stall, Watchdog, state_of
from keyshard.core.position.entry import TopicPartition
from keyshard.core.ring.hash_range import HashRange
from keyshard.core.ring.key_slot import possible_slots
from keyshard.dead_letter.parked_keys import ParkedKeys
from keyshard.errors import KeyShardError, NotRunningError
from keyshard.observe.broker_facts import BrokerFacts, PartitionFacts
from keyshard.observe.handling import Handling, Owned
from keyshard.observe.status_types import (
    BlockingKey,
    Explanation,
    ParkedBy,
    ParkedMessage,
    PartitionStatus,
    Place,
    RangeStatus,
    Status,
)
from keyshard.redaction import redacted

LIVE_S = 60.0
"""Time without a turn of its loop after which a run is taken for dead, seconds."""
LETTER_S = 5.0
"""Longest wait for the dead letter that tells why a key is parked, seconds."""
VALUE_MAX = 200
"""Most bytes that are told of the content of a parked message."""
PARKED_MAX = 100
"""Parked keys that a status names, those parked longest; how many there are it always tells."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What the status is about: the parts of a run that know something."""

    config: SourceConfig
    coordinator: Coordinator
    handling: Handling
    """What it does with messages."""
    executor: str
    workers: Callable[[], int]
    """Handlers that may run at the same time now: threads or processes, or 1 for an event loop."""
    workers_max: int | None
    """The same for any number of ranges; ``None``: only lanes limit."""
    stopping: Callable[[], bool]
    rescaler: Callable[[], Rescaler | None]
    """``None`` while it starts."""
    turned_s: Callable[[], float] = time.monotonic
    """When the loop of the run went round last."""
    parked: Callable[[], ParkedKeys | None] = lambda: None
    """``None`` where nothing is parked, and while it starts."""
    unpark: Callable[[Selection], int] | None = None
    """Lets parked keys out; ``None`` where nothing is parked."""
    discard: Callable[..., int] | None = None
    """Gives letters of a :class:`Selection` up, or only counts them (``count_only``): ``rejected``
    ones, or those of parked keys."""
    first_letter: Callable[[str, float], Letter | None] | None = None
    """Reads the first dead letter of a parked key within so many seconds; ``None`` where nothing is
    parked."""

    @property
    def phase(self) -> str:
        """``starting``, ``running`` or ``stopping``."""
        if self.stopping():
            return "stopping"
        return "starting" if self.rescaler() is None else "running"


class StatusView:
    """Builds the status of one run. Methods may be called from any thread, and never wait long.

    Args:
        subject: The run.
        broker_facts: What the broker says; ``None`` without an admin interface.
    """

    def __init__(self, subject: Subject, broker_facts: BrokerFacts | None) -> None:
        self._subject = subject
        self._broker_facts = broker_facts
        self._owner = f"{socket.gethostname()}:{os.getpid()}"
        self._lock = threading.Lock()
        self._watchdog = Watchdog()

    def watch(self) -> list[Stall]:
        """Look for ranges that stall; those that are to be named now."""
        if not self._subject.coordinator.started:
            return []
        now_s = time.monotonic()
        handling = self._subject.handling
        facts = handling.ranges(now_s, self._owned())
        usual_s, pause = handling.pace()
        with self._lock:
            return self._watchdog.look(now_s, facts, usual_s=usual_s, pause=pause)

    def status(self) -> Status:
        """Everything; see ``docs/status.md``."""
        subject = self._subject
        now_s = time.monotonic()
        started = subject.coordinator.started
        owned = self._owned() if started else Owned({}, {}, set(), {})
        facts = subject.handling.ranges(now_s, owned) if started else []
        totals = subject.handling.totals(now_s)
        troubles = subject.coordinator.worker.troubles() if started else {}
        with self._lock:
            stalls = dict(self._watchdog.stalls)
        config, parked = subject.config, subject.parked()
        return {
            "state": subject.phase,
            "subscription": config.subscription,
            "topics": list(config.topics),
            "topicsPattern": config.topics_pattern,
            "serviceUrl": redacted(config.service_url),
            "transport": transport_of(config.how_to_connect()),
            "decoder": decoder_of(config.how_to_connect()),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "epoch": subject.coordinator.epoch if started else 0,
            "lanes": subject.handling.lanes,
            "workers": subject.workers(),
            "workersMax": subject.workers_max,
            "executor": subject.executor,
            "ranges": [self._range(each, owned, stalls.get(each.index), now_s) for each in facts],
            "partitions": [
                self._partition(where, missing, troubles.get(where, ""))
                for where, missing in sorted(owned.gaps.items())
            ],
            "parkedKeys": 0 if parked is None else len(parked),
            "parked": [
                {"key": key, "letters": letters}
                for key, letters in (() if parked is None else parked.some(PARKED_MAX))
            ],
            "malformedLetters": 0 if parked is None else parked.malformed,
            "counters": totals.counters,
            "handlerSeconds": totals.timings,
            "circuit": totals.circuit,
            "window": subject.coordinator.status() if started else None,
            "brokerError": "" if self._broker_facts is None else self._broker_facts.error,
        }

    def not_live(self) -> str:
        """What only a restart of the process may mend; empty when nothing is known."""
        idle_s = time.monotonic() - self._subject.turned_s()
        if self._subject.phase != "running" or idle_s < LIVE_S:
            return ""
        return f"The loop of the run has not gone round for {idle_s:.0f} s."

    def not_ready(self) -> str:
        """Why the source does not take messages; empty when it does."""
        phase = self._subject.phase
        if phase != "running":
            return f"The source is {phase}."
        troubles = self._subject.coordinator.worker.troubles()
        if troubles:
            where, text = min(troubles.items())
            others = len(troubles) - 1
            more = f" Nor are {others} other topic partitions." if others else ""
            return f"{where} is not received from: {text}{more}"
        away = sorted({name for names in self._owned().disconnected.values() for name in names})
        if not away:
            return ""
        more = f" and {len(away) - 1} more" if len(away) > 1 else ""
        return f"Not every consumer is connected to {away[0]}{more}."

    def explain(self, key: str) -> Explanation:
        """Where a key lies, and what happens to it, as plain JSON values.

        For a parked key, its first dead letter is read, which may take ``LETTER_S``.

        Raises:
            NotRunningError: The source is starting.
        """
        if not self._subject.coordinator.started:
            raise NotRunningError("The source is still starting. Ask again in a moment.")
        slot, *others = possible_slots(key)
        parked = self._subject.parked()
        place = self._subject.handling.place(key, [slot, *others], time.monotonic())
        owned = self._owned().owned
        at, *of_bytes = [
            _place(each, by, owned.get(by, []))
            for each, by in zip([slot, *others], place.owners, strict=True)
        ]
        return {
            "key": key,
            **at,
            "ifBytes": of_bytes[0] if of_bytes else None,
            "owner": self._owner,
            "lane": place.lane,
            "waiting": place.waiting,
            "parked": parked is not None and parked.state(key) is not None,
            "parkedBy": self._parked_by(key),
        }

    def _parked_by(self, key: str) -> ParkedBy | None:
        """Why a key is parked; ``None`` when it is not, or its dead letter is still on its way."""
        parked, first_letter = self._subject.parked(), self._subject.first_letter
        since = None if parked is None else parked.since(key)
        if since is None or first_letter is None:
            return None
        count, since_ms = since
        told: ParkedBy = {
            "letters": count,
            "forSeconds": round(max(0.0, time.time() - since_ms / 1000), 1) if since_ms else None,
            "message": None,
            "unknown": "",
        }
        try:
            letter = first_letter(key, LETTER_S)
        except KeyShardError as exc:
            told["unknown"] = exc.message
            return told
        if letter is None:
            told["unknown"] = "its first dead letter is no longer stored"
        else:
            told["message"] = _message(letter)
        return told

    def _owned(self) -> Owned:
        return Owned.of(self._subject.coordinator.worker.owned_ranges())

    def _range(
        self,
        facts: RangeFacts,
        owned: Owned,
        stall: Stall | None,
        now_s: float,
    ) -> RangeStatus:
        blocking = facts.blocking
        if blocking is not None and stall is None and not blocking.blocks:
            blocking = None
        age = None if facts.oldest is None else datetime.now(timezone.utc) - facts.oldest
        return {
            "index": facts.index,
            "hashRanges": [str(one) for one in owned.owned.get(facts.index, ())],
            "owner": self._owner,
            "state": state_of(facts, stalled=stall is not None).value,
            "waiting": facts.waiting,
            "inFlight": facts.in_flight,
            "handled": facts.handled,
            "oldestUnacknowledgedMillis": (
                None if age is None else max(0, int(age.total_seconds() * 1000))
            ),
            "blockedBy": None if blocking is None else _key(blocking),
            "stalled": None
            if stall is None
            else {"forSeconds": round(now_s - stall.since_s, 1), "reason": stall.reason},
        }

    def _partition(
        self, where: TopicPartition, missing: tuple[HashRange, ...], error: str
    ) -> PartitionStatus:
        facts: PartitionFacts | None = None
        if self._broker_facts is not None:
            facts = self._broker_facts.known.get(where)
        return {
            "topic": where.topic,
            "partition": where.partition,
            "covered": not missing,
            "gaps": list(map(str, missing)),
            "error": error,
            "backlog": None if facts is None else facts.backlog,
            "ackHoles": None if facts is None else facts.ack_holes,
            "ackHolesMax": None if facts is None else facts.ack_holes_max,
            "replay": None if facts is None else facts.replay,
            "replayMax": None if facts is None else facts.replay_max,
        }


def _key(facts: KeyFacts) -> BlockingKey:
    return {
        "key": facts.key,
        "messageId": facts.message_id,
        "attempts": facts.attempts,
        "reason": facts.reason,
    }


def _message(letter: Letter) -> ParkedMessage:
    message, value = letter.message, letter.message.value
    return {
        "topic": message.topic,
        "partition": message.partition,
        "messageId": str(message.message_id),
        "attempts": letter.attempts,
        "error": letter.error,
        "value": None if value is None else value[:VALUE_MAX].decode(errors="replace"),
        "valueBytes": 0 if value is None else len(value),
    }


def _place(slot: int, index: int, owned: Collection[HashRange]) -> Place:
    """Where a slot lies."""
    ranges = " ".join(str(one) for one in owned if slot in one)
    return {"slot": slot, "range": index, "hashRange": ranges}
