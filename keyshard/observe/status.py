"""The status of a running source, as plain JSON values, and the explanation of a key."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from datetime import datetime, timezone

from keyshard.broker.connect import decoder_of, transport_of
from keyshard.coordinator.progress import Progress
from keyshard.core.dead_letter import DeadLetter
from keyshard.core.lanes.rate_limit import RateLimitStatus
from keyshard.core.partition_watchdog import PartitionStall
from keyshard.core.position.entry import TopicPartition
from keyshard.core.range_watchdog import (
    KeyFacts,
    Load,
    Pause,
    RangeFacts,
    RangeWatchdog,
    Stall,
    Stalled,
    reason_of,
    shown_key,
    state_of,
)
from keyshard.core.rates import Loads, Pace, Trend
from keyshard.core.ring.hash_range import HashRange
from keyshard.core.ring.key_slot import possible_slots
from keyshard.errors import KeyShardError, NotRunningError
from keyshard.observe.broker_poll import BrokerPoll, PartitionFacts
from keyshard.observe.handler_view import Ownership, Totals
from keyshard.observe.observed_run import ObservedRun
from keyshard.observe.status_types import (
    BlockingKey,
    Explanation,
    HotKeyStatus,
    Lag,
    NewestErrorStatus,
    ParkedBy,
    ParkedMessage,
    PartitionStatus,
    RangeStatus,
    Rates,
    SlotAssignment,
    Status,
)
from keyshard.redaction import redacted

LIVE_S = 60.0
"""Time without a turn of its loop after which a run counts as dead, seconds."""
DEAD_LETTER_S = 5.0
"""Longest wait for the dead letter that shows why a key is parked, seconds."""
VALUE_MAX = 200
"""Most bytes of the content of a parked message that are shown."""
PARKED_MAX = 100
"""Most parked keys in a status, those parked longest; their number is always there."""
HOT_KEYS_MAX = 5
"""Most hot keys in a status."""
HOT_SHARE = 0.01
"""Share of the messages from which a key is hot."""
VERSION = 1
"""Version of the status. A field that is renamed, removed or changes its meaning raises it."""
TRENDS_MAX = 1_000
"""Most topic partitions whose trend is judged, in the order of their names."""


class StatusView:
    """Builds the status of one run. Any thread may call its methods, which never wait long.

    Args:
        subject: The run.
        broker_facts: Facts from the broker; ``None`` without an admin interface.
    """

    def __init__(self, subject: ObservedRun, broker_facts: BrokerPoll | None) -> None:
        self._subject = subject
        self._broker_facts = broker_facts
        self._owner = f"{socket.gethostname()}:{os.getpid()}"
        self._lock = threading.Lock()
        self._watchdog = RangeWatchdog()
        self._pace, self._loads = Pace(), Loads()
        self._began_s = time.monotonic()

    def watch(self) -> list[Stall]:
        """Sample rates, lags and loads, and look for stalls; return the stalls to log now."""
        if not self._subject.coordinator.started:
            return []
        now_s = time.monotonic()
        handling = self._subject.handling
        owned = self._owned()
        facts = handling.ranges(now_s, owned)
        usual_s, pause = handling.pace()
        held_back = _held_back(handling.rate_limit(now_s))
        counters = handling.totals(now_s).counters
        progress = self._subject.coordinator.status()
        lags = self._lags(owned, progress)
        values: dict[Hashable, float | None] = {
            "received": progress["rowsReceived"],
            "completed": counters["completed"],
            "failedAttempts": counters["failedAttempts"],
        }
        judged = {where: lags[where] for where in sorted(lags)[:TRENDS_MAX]}
        for name, lag in (("lag", _joined(lags.values())), *judged.items()):
            values |= {(name, "rows"): lag["rows"], (name, "seconds"): lag["seconds"]}
        with self._lock:
            self._pace.look(now_s, values)
            self._loads.look(now_s, facts)
            return self._watchdog.look(
                now_s, facts, usual_s=usual_s, pause=pause, held_back=held_back
            )

    def status(self) -> Status:
        """Return the whole status; see ``docs/status.md``."""
        subject, now_s = self._subject, time.monotonic()
        started = subject.coordinator.started
        owned = self._owned() if started else Ownership({}, {}, set(), {})
        facts = subject.handling.ranges(now_s, owned) if started else []
        totals = subject.handling.totals(now_s)
        problems = subject.coordinator.consumers.problems() if started else {}
        progress = subject.coordinator.status() if started else None
        lags = {} if progress is None else self._lags(owned, progress)
        lag = _joined(lags.values())
        _, pause = subject.handling.pace()
        rate = subject.handling.rate_limit(now_s)
        held_back = _held_back(rate)
        with self._lock:
            stalls = dict(self._watchdog.stalls)
            shares = [self._loads.shares(each.index) for each in facts]
            trends = {where: self._pace.trend((where, _unit(lags[where]))) for where in lags}
            lag["trend"] = _value(self._pace.trend(("lag", _unit(lag))))
            rates: Rates = {
                "received": _rounded(self._pace.rate("received")),
                "completed": _rounded(self._pace.rate("completed")),
                "failedAttempts": _rounded(self._pace.rate("failedAttempts")),
            }
        for where, trend in trends.items():
            lags[where]["trend"] = _value(trend)
        none_parked = 0 if subject.has_started else None
        config, parked = subject.config, subject.parked()
        return {
            "version": VERSION,
            "kind": subject.kind,
            "name": config.name or config.subscription,
            "state": "paused" if subject.paused and subject.phase == "running" else subject.phase,
            "uptimeSeconds": round(now_s - self._began_s, 1),
            "newestError": self._newest_error(totals, progress, now_s),
            "lag": lag,
            "rates": rates,
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
            "handlerSlots": subject.handling.handler_slots(now_s) if started else [],
            "ranges": [
                self._range(
                    each, owned, stalls, now_s, pause=pause, shares=load, held_back=held_back
                )
                for each, load in zip(facts, shares, strict=True)
            ],
            "partitions": [
                self._partition(
                    where, missing, problems.get(where, ""), lags.get(where) or _lag(), now_s
                )
                for where, missing in sorted(owned.gaps.items())
            ],
            "parkedKeys": none_parked if parked is None else len(parked),
            "parked": [
                {"key": key, "deadLetters": dead_letters}
                for key, dead_letters in (() if parked is None else parked.some(PARKED_MAX))
            ],
            "malformedDeadLetters": none_parked if parked is None else parked.malformed,
            "counters": totals.counters,
            "handlerSeconds": totals.timings,
            "circuit": totals.circuit,
            "rateLimit": rate,
            "outputs": subject.handling.outputs(),
            "hotKeys": self._hot_keys(owned) if started else None,
            "window": progress,
            "history": subject.coordinator.history() if started else None,
            "brokerError": "" if self._broker_facts is None else self._broker_facts.error,
        }

    def not_live(self) -> str:
        """Return an error that only a restart of the process may fix; empty if there is none."""
        idle_s = time.monotonic() - self._subject.turned_s()
        if self._subject.phase != "running" or idle_s < LIVE_S:
            return ""
        return f"The main loop of the source has been stuck for {idle_s:.0f} s."

    def not_ready(self) -> str:
        """Return why the source does not take messages; empty if it does."""
        phase = self._subject.phase
        if phase != "running":
            return f"The source is {phase}."
        problems = self._subject.coordinator.consumers.problems()
        if problems:
            where, text = min(problems.items())
            others = len(problems) - 1
            more = f" {others} other topic partitions receive nothing either." if others else ""
            return f"{where} receives nothing: {text}{more}"
        away = sorted({name for names in self._owned().disconnected.values() for name in names})
        if not away:
            return ""
        more = f" and {len(away) - 1} more" if len(away) > 1 else ""
        return f"Some consumers are not connected to {away[0]}{more}."

    def explain(self, key: str) -> Explanation:
        """Return the range and the state of a key, as plain JSON values.

        For a parked key, its first dead letter is read, which may take ``DEAD_LETTER_S``.

        Raises:
            NotRunningError: The source is starting.
        """
        if not self._subject.coordinator.started:
            raise NotRunningError("The source is still starting.", "Try again later.")
        slot, *others = possible_slots(key)
        parked = self._subject.parked()
        key_state = self._subject.handling.key_state(key, [slot, *others], time.monotonic())
        owned = self._owned().owned
        at, *of_bytes = [
            _slot_assignment(each, by, owned.get(by, []))
            for each, by in zip([slot, *others], key_state.owners, strict=True)
        ]
        return {
            "key": key,
            **at,
            "ifBytes": of_bytes[0] if of_bytes else None,
            "owner": self._owner,
            "lane": key_state.lane,
            "waiting": key_state.waiting,
            "parked": parked is not None and parked.state(key) is not None,
            "parkedBy": self._parked_by(key),
        }

    def _parked_by(self, key: str) -> ParkedBy | None:
        """Return why a key is parked; ``None`` if it is not, or has no confirmed dead letter."""
        parked, dead_letters = self._subject.parked(), self._subject.dead_letters
        since = None if parked is None else parked.since(key)
        if since is None or dead_letters is None:
            return None
        count, since_ms = since
        parked_by: ParkedBy = {
            "deadLetters": count,
            "forSeconds": round(max(0.0, time.time() - since_ms / 1000), 1) if since_ms else None,
            "message": None,
            "unknown": "",
        }
        try:
            found = dead_letters().dead_letters.peek(key, DEAD_LETTER_S)
        except KeyShardError as exc:
            parked_by["unknown"] = exc.message
            return parked_by
        if found is None:
            parked_by["unknown"] = "its first dead letter is no longer stored"
        else:
            parked_by["message"] = _message(*found)
        return parked_by

    def _lags(self, owned: Ownership, progress: Progress) -> dict[TopicPartition, Lag]:
        """Return the lag of every topic partition, without trends."""
        ages_ms, now_ms = self._subject.coordinator.oldest_ms(), time.time() * 1000
        known = {} if self._broker_facts is None else self._broker_facts.known
        entries = progress["entriesReceived"]
        per_entry = progress["rowsReceived"] / entries if entries else None
        lags: dict[TopicPartition, Lag] = {}
        for where in owned.gaps:
            facts, age_ms = known.get(where), ages_ms.get(where)
            backlog = None if facts is None else facts.backlog
            if age_ms is None and backlog == 0:
                age_ms = 0
            elif age_ms is None and facts is not None and facts.oldest_ms:
                age_ms = max(0, round(now_ms - facts.oldest_ms))
            lags[where] = {
                "entries": backlog,
                "rows": _rows(backlog, per_entry),
                "seconds": None if age_ms is None else age_ms / 1000,
                "brokerSeconds": None if facts is None else facts.age_s,
                "trend": None,
            }
        return lags

    def _newest_error(
        self, totals: Totals, progress: Progress | None, now_s: float
    ) -> NewestErrorStatus | None:
        """Return an error that persists, else the newest failed attempt."""
        lasting = [] if progress is None else [
            progress["connectionError"], progress["gapResolverError"], progress["discoveryError"],
        ]  # fmt: skip
        if self._broker_facts is not None:
            lasting.append(self._broker_facts.error)
        if text := next(filter(None, lasting), ""):
            return {"error": text, "secondsAgo": None}
        if (newest := totals.newest_error) is None:
            return None
        return {"error": newest.text, "secondsAgo": round(max(0.0, now_s - newest.at_s), 1)}

    def _hot_keys(self, owned: Ownership) -> list[HotKeyStatus] | None:
        hot = self._subject.coordinator.consumers.hot_keys(HOT_KEYS_MAX, HOT_SHARE)
        if hot is None:
            return None
        return [
            {
                "key": shown_key(key),
                "share": round(share, 4),
                "ranges": [
                    index
                    for index, parts in owned.owned.items()
                    if any(slot in part for slot in possible_slots(key) for part in parts)
                ],
            }
            for key, share in hot
        ]

    def _owned(self) -> Ownership:
        return Ownership.of(self._subject.coordinator.consumers.owned_ranges())

    def _range(
        self,
        facts: RangeFacts,
        owned: Ownership,
        stalls: Mapping[int, Stall],
        now_s: float,
        *,
        pause: Pause | None,
        held_back: bool,
        shares: Mapping[Load, float] | None,
    ) -> RangeStatus:
        blocking, stall = facts.blocking, stalls.get(facts.index)
        if blocking is not None and stall is None and not blocking.blocks:
            blocking = None
        age = None if facts.oldest is None else datetime.now(timezone.utc) - facts.oldest
        return {
            "index": facts.index,
            "hashRanges": [str(one) for one in owned.owned.get(facts.index, ())],
            "owner": self._owner,
            "state": state_of(facts, stalled=stall is not None).value,
            "waiting": facts.waiting if facts.counted else None,
            "inFlight": facts.in_flight if facts.counted else None,
            "handled": facts.handled if facts.counted else None,
            "oldestUnacknowledgedMillis": (
                None if age is None else max(0, int(age.total_seconds() * 1000))
            ),
            "blockedBy": None if blocking is None else _key(blocking),
            "stalled": _stalled(stall, now_s),
            "reason": reason_of(
                facts, stall, pause, held_back=held_back, source_paused=self._subject.paused
            ),
            "shares": None
            if shares is None or self._subject.fixed
            else {
                "busy": round(shares[Load.BUSY], 3),
                "waiting": round(shares[Load.WAITING], 3),
                "heldBack": round(shares[Load.HELD_BACK], 3),
            },
        }

    def _partition(
        self,
        where: TopicPartition,
        missing: tuple[HashRange, ...],
        error: str,
        lag: Lag,
        now_s: float,
    ) -> PartitionStatus:
        facts: PartitionFacts | None = None
        stall: PartitionStall | None = None
        unknown = "no admin_url"
        if self._broker_facts is not None:
            facts = self._broker_facts.known.get(where)
            stall = self._broker_facts.stalls.get(where)
            unknown = self._broker_facts.error or "no answer yet"
        return {
            "topic": where.topic,
            "partition": where.partition,
            "covered": not missing,
            "gaps": list(map(str, missing)),
            "error": error,
            "stalled": _stalled(stall, now_s),
            "lag": lag,
            "backlog": None if facts is None else facts.backlog,
            "ackGaps": None if facts is None else facts.ack_gaps,
            "ackGapsMax": None if facts is None else facts.ack_gaps_max,
            "replay": None if facts is None else facts.replay,
            "replayMax": None if facts is None else facts.replay_max,
            "unknown": unknown if facts is None else "",
            "limitsAssumed": None if facts is None else facts.limits_assumed,
        }


def _stalled(stall: Stall | PartitionStall | None, now_s: float) -> Stalled | None:
    if stall is None:
        return None
    return {
        "forSeconds": round(now_s - stall.since_s, 1),
        "kind": stall.kind.value,
        "reason": stall.reason,
    }


def _held_back(rate: RateLimitStatus | None) -> bool:
    return rate is not None and rate["holdsBack"]


def _lag() -> Lag:
    return {"entries": None, "rows": None, "seconds": None, "brokerSeconds": None, "trend": None}


def _rows(entries: int | None, per_entry: float | None) -> int | None:
    """Return the rows of a backlog; ``None`` if its entries or the rows of each are unknown."""
    if not entries:
        return entries
    return None if per_entry is None else round(entries * per_entry)


def _joined(lags: Collection[Lag]) -> Lag:
    """Return the lag of a source.

    Entries and rows are sums, unknown if those of a topic partition are. An age is the highest
    known one; if that is 0 and another one is unknown, it is unknown, too.
    """
    return {
        "entries": _sum(each["entries"] for each in lags),
        "rows": _sum(each["rows"] for each in lags),
        "seconds": _highest([each["seconds"] for each in lags]),
        "brokerSeconds": _highest([each["brokerSeconds"] for each in lags]),
        "trend": None,
    }


def _highest(ages: Sequence[float | None]) -> float | None:
    known = [age for age in ages if age is not None]
    highest = max(known, default=None)
    return None if not highest and len(known) < len(ages) else highest


def _sum(counts: Iterable[int | None]) -> int | None:
    """Return a sum; ``None`` if there are no counts, or one is unknown."""
    known = list(counts)
    return sum(one for one in known if one is not None) if known and None not in known else None


def _unit(lag: Lag) -> str:
    """Return the number that decides the trend of a lag: rows, or seconds if they are unknown."""
    return "seconds" if lag["rows"] is None else "rows"


def _value(trend: Trend | None) -> str | None:
    return None if trend is None else trend.value


def _rounded(rate: float | None) -> float | None:
    return None if rate is None else round(rate, 2)


def _key(facts: KeyFacts) -> BlockingKey:
    return {
        "key": facts.key,
        "messageId": facts.message_id,
        "attempts": facts.attempts,
        "reason": facts.reason,
    }


def _message(dead_letter: DeadLetter, in_parts: bool) -> ParkedMessage:
    message, value = dead_letter.message, dead_letter.message.value
    shown = None if in_parts or value is None else value[:VALUE_MAX].decode(errors="replace")
    length = 0 if value is None else None if in_parts else len(value)
    return {
        "topic": message.topic,
        "partition": message.partition,
        "messageId": str(message.message_id),
        "attempts": dead_letter.attempts,
        "error": dead_letter.error,
        "value": shown,
        "valueBytes": length,
    }


def _slot_assignment(slot: int, index: int, owned: Collection[HashRange]) -> SlotAssignment:
    ranges = " ".join(str(one) for one in owned if slot in one)
    return {"slot": slot, "range": index, "hashRange": ranges}
