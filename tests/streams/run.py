"""One case: queries of a session, faults one after the other, and the verdict."""

from __future__ import annotations

import json
import random
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.chaos.admin_proxy import FOREIGN_404, HANGS, STATUS_500, AdminProxy
from tests.streams.cluster import Broker, entry_of, text_of
from tests.streams.draw import Query, Topic, change, query_of, register
from tests.streams.ends import end
from tests.streams.running import Running
from tests.streams.session import STEPS, numbers_in
from tests.streams.values import (
    BAD,
    NONE,
    PROTOBUF,
    RECORDS,
    SEPARATED,
    Sent,
    encoded,
    malformed,
    wrong,
)
from tests.support.deadlines import deadline

SETTLE_S = deadline(150)
"""Once the faults have stopped, everything is done in this time, seconds."""
_KEYS: tuple[str | bytes | None, ...] = ("k1", "k2", "ключ", "", b"\x00\xff", b"k1", None)
_STARTED_S = deadline(60)
_STEP_S = deadline(20)
_POLL_S = 0.1
FAULTS = (
    *("kill session",) * 3, "kill broker", "stop broker", "unload", "new version", "bad version",
    "grow", "admin 500", "admin 404", "admin hang", "restart query", "pause",
)  # fmt: skip
_ANSWERS = {"admin 500": STATUS_500, "admin 404": FOREIGN_404, "admin hang": HANGS}
"""The faults of all answers of the admin interface."""


class Case(Running):
    """Everything of one seed.

    Args:
        broker: Whose topics are made.
        seed: Decides all.
        directory: For its files.
        say: Called with a line about each event.
    """

    def __init__(
        self, broker: Broker, seed: int, directory: Path, say: Callable[[str], None]
    ) -> None:
        super().__init__(random.Random(seed), directory, say)
        self.broker = broker
        self.number = 0
        """Number of the newest published message."""
        self._seed = seed
        self._entries = 0

    def run(self) -> None:
        """The case, from its topics to its verdict."""
        with ExitStack() as stack:
            self._admin = stack.enter_context(AdminProxy(self.broker.admin_url))
            stack.callback(self.kill)
            count = self.drawn.choice((2, 3, 3))
            for number in range(count):
                name = f"s{self._seed}-{number}"
                query = query_of(self.drawn, name, self.broker, self._admin.url, self.directory)
                self.say(f"  {query.text()}")
                self.queries.append(query)
                self.publish(query, 30)
            self.session()
            faults = [self.drawn.choice(FAULTS) for _ in range(self.drawn.randint(5, 9))]
            for fault in faults:
                self.say(f"  {fault}")
                self._inject(fault)
                for query in self.queries:
                    self.publish(query, self.drawn.randint(5, 60))
            self._settle()
            self.judge()
            for query in self.queries:
                end(self, query)
            self.judge()

    # -- publishing -------------------------------------------------------------------------------

    def publish(self, query: Query, count: int, topic: Topic | None = None) -> None:
        """Publish messages for a query, and remember them."""
        drawn = self.drawn
        burst = drawn.random() < 0.15 and query.mode != "FAILFAST" and query.kind != NONE
        parts: dict[tuple[str, int], list[Any]] = {}
        topics = [topic] if topic else query.topics
        while count > 0:
            one = drawn.choice(topics)
            key = drawn.choice(_KEYS)
            if query.kind == SEPARATED and isinstance(key, bytes):
                key = "bytes"
            partition = drawn.randrange(one.partitions) if one.partitions and key is None else -1
            if one.partitions and key is not None:
                partition = sum(key if isinstance(key, bytes) else key.encode()) % one.partitions
            version = drawn.choice(list(one.versions)) if one.versions else 0
            if version == BAD and query.mode == "FAILFAST":
                version = 0
            self._entries += 1
            ordering = "" if drawn.random() < 0.05 else None
            made: list[Sent] = []
            for _ in range(drawn.randint(1, min(count, 4))):
                count -= 1
                self.number += 1
                corrupt = burst and drawn.random() < 0.5
                tombstone = not corrupt and drawn.random() < 0.1
                sent = Sent(
                    self.number, one.name, partition, self._entries, key, ordering, query.kind,
                    version, tombstone, corrupt, payload=None, confirmed=False,
                )  # fmt: skip
                payload = malformed(query.kind, self.number) if corrupt else None
                if not corrupt and not tombstone:
                    payload = encoded(query.kind, version, sent.number, sent.name, key)
                made.append(replace(sent, payload=payload))
            output = one.versions.get(version)
            if made[0].corrupt and drawn.random() < 0.5:
                output = None if len(made) == 1 else output
            entry = entry_of([(s.number, s.payload) for s in made], key, ordering, output, drawn)
            parts.setdefault((one.name, partition), []).append((made, entry))
        for (name, partition), entries in parts.items():
            full = name if partition < 0 else f"{name}-partition-{partition}"
            done = self.broker.publish(full, [entry for _, entry in entries])
            for number, (made, _) in enumerate(entries):
                query.sent += [replace(one, confirmed=number < done) for one in made]

    # -- faults -----------------------------------------------------------------------------------

    def _inject(self, fault: str) -> None:
        drawn, broker = self.drawn, self.broker
        query = drawn.choice(self.queries)
        topic = drawn.choice(query.topics)
        if fault == "kill session":
            self._kill_session(query)
        elif fault == "kill broker":
            broker.restart()
        elif fault == "stop broker":
            broker.signal(signal.SIGSTOP)
            self.pause(drawn.choice((3.0, 10.0)))
            broker.signal(signal.SIGCONT)
        elif fault == "unload":
            broker.unload()
        elif fault in ("new version", "bad version"):
            self._new_version(query, BAD if fault == "bad version" else 1)
        elif fault == "grow" and topic.partitions:
            topic.partitions += 1
            broker.grow(topic.name, topic.partitions)
        elif fault.startswith("admin "):
            self._admin.spoil(self._seed, 1.0, (_ANSWERS[fault],))
            for one in self.queries:
                self.publish(one, 10)
            self.pause(drawn.choice((2.0, 6.0)))
            self._admin.spoil(self._seed, 0.0)
        elif fault == "restart query":
            self._restart(query)
        else:
            self.pause(drawn.uniform(0.5, 3.0))

    def _new_version(self, query: Query, version: int) -> None:
        """Register a version for all of its topics: their columns have to be the same."""
        if query.kind not in RECORDS or version in query.topics[0].versions:
            return
        if version == BAD and (query.mode == "FAILFAST" or query.kind == PROTOBUF):
            return
        for topic in query.topics:
            register(self.broker, topic, version)

    def _kill_session(self, query: Query) -> None:
        step = self.drawn.choice((*STEPS, None))
        self.say(f"    {query.name} at {step}")
        assert self.process is not None
        self.until(lambda: query.name in self.started or query.over, _STARTED_S,
                    f"the start of {query.name}")  # fmt: skip
        self.may_end = True
        if step is not None:
            self.order(die=query.name, step=step)
            self.publish(query, 20)
            end = time.monotonic() + _STEP_S
            while self.process.poll() is None and time.monotonic() < end:
                self.tend()
                time.sleep(_POLL_S)
        self.kill()
        self.tend()
        self._check_backlogs()
        change(self.drawn, query)
        self.session()
        self.may_end = False

    def _restart(self, query: Query) -> None:
        self.order(stop=query.name)
        change(self.drawn, query)
        if not query.over:
            self.order(start=query.spec)

    # -- the verdict ------------------------------------------------------------------------------

    def rows(self, query: Query) -> list[tuple[int, int, dict[str, Any]]]:
        """Return its rows in order: batch, number and columns of each."""
        with closing(sqlite3.connect(query.spec["sink"])) as sink:
            found = sink.execute("SELECT batch, n, columns FROM rows ORDER BY batch, place")
            return [(batch, n, json.loads(columns)) for batch, n, columns in found]

    def missing(self, query: Query) -> list[int]:
        """Messages that are confirmed, could be decoded, and are in no batch."""
        there = {n for _, n, _ in self.rows(query)}
        return [
            one.number for one in query.sent
            if one.confirmed and one.number not in there
            and not (one.may_be_malformed or query.has_bad)
        ]  # fmt: skip

    def _check_backlogs(self) -> None:
        """Check that no entry outside a committed batch is acknowledged."""
        for query in self.queries:
            commits = numbers_in(Path(query.spec["checkpoint"]) / "commits")
            done = {n for batch, n, _ in self.rows(query) if batch in commits}
            for topic in query.topics:
                for partition, full in enumerate(topic.names()):
                    owed = {
                        one.entry for one in query.sent
                        if one.confirmed and one.topic == topic.name
                        and one.partition == (partition if topic.partitions else -1)
                        and one.number not in done and not (one.may_be_malformed or query.has_bad)
                    }  # fmt: skip
                    backlog = self.broker.backlog(full, query.subscription)
                    if 0 <= backlog < len(owed):
                        self.problems.append(
                            f"{query.name}: {len(owed)} entries of {full} are in no committed "
                            f"batch, and the backlog is {backlog}"
                        )

    def _settle(self) -> None:
        for query in self.queries:
            if query.over:
                continue
            self.until(
                lambda query=query: query.over or not self.missing(query),  # type: ignore[misc]
                SETTLE_S, f"all messages of {query.name}",
            )  # fmt: skip
            if missing := self.missing(query):
                self.problems.append(f"{query.name}: missing {len(missing)}: {missing[:10]}")
            for topic in query.topics:
                for full in topic.names():
                    self.until(
                        lambda full=full, query=query: query.over  # type: ignore[misc]
                        or self.broker.backlog(full, query.subscription) <= 0,
                        deadline(60), f"a backlog of 0 of {full} for {query.subscription}",
                    )  # fmt: skip

    def settle_one(self, query: Query) -> None:
        """Wait until it has all of its messages."""
        self.until(
            lambda: query.over or not self.missing(query), SETTLE_S, f"the rest of {query.name}"
        )

    def judge(self) -> None:
        """Each message once, in the order of its key, with what was written."""
        for query in self.queries:
            by_number = {one.number: one for one in query.sent}
            seen: set[int] = set()
            last: dict[Any, int] = {}
            for batch, number, row in self.rows(query):
                sent = by_number.get(number)
                if sent is None:
                    self.problems.append(f"{query.name}: nobody sent {number}")
                    continue
                if number in seen:
                    self.problems.append(f"{query.name}: {number} twice, also in batch {batch}")
                seen.add(number)
                output = self._wrong(query, sent, row)
                if output:
                    self.problems.append(f"{query.name}: {sent}: {output}; {row}")
                if sent.routing_key or (sent.routing_key == "" and not query.by_client):
                    key = sent.topic, sent.partition, sent.routing_key
                    if last.get(key, 0) > number:
                        self.problems.append(f"{query.name}: {number} after {last[key]} of {key}")
                    last[key] = number

    def _wrong(self, query: Query, sent: Sent, row: dict[str, Any]) -> str:
        """Judge by the modes of all its starts, because rows of an earlier one stay."""
        modes = {query.mode, "PERMISSIVE"}
        output = [wrong(sent, row, mode, any_malformed=query.has_bad) for mode in sorted(modes)]
        if "" in output:
            if "__key" in row and query.spec["format"] == "keyshard":
                wanted = text_of(sent.key)
                if sent.key == "" and row["__key"] is None:
                    return ""  # pulsar-client shows none
                return "" if row["__key"] == wanted else f"key {row['__key']!r}, not {wanted!r}"
            return ""
        return output[0]
