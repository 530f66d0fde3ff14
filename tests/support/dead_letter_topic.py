"""A cluster with a dead-letter topic that sources open one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from keyshard.broker.memory import MemoryBroker, MemoryCluster
from keyshard.core.dead_letter import DeadLetter, DeadLetterKind, StoredDeadLetter
from keyshard.core.dead_letter_filter import DeadLetterFilter
from keyshard.core.message import Message, MessageId
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.dead_letters.startup import open_dead_letters
from keyshard.dead_letters.store import DeadLetterStore
from keyshard.errors import KeyShardError
from tests.helpers import P0, config, present
from tests.support.faulty_broker import ScriptedCall, faulty, giving

KEEPS = "unit-parked"
PUBLISHED = datetime(2024, 5, 1, tzinfo=timezone.utc)


class DeadLetterTopic:
    """A cluster with a dead-letter topic that sources open one after the other."""

    def __init__(self, entries_per_ledger: int = 3, *, exists: bool = True) -> None:
        self.cluster = MemoryCluster(entries_per_ledger=entries_per_ledger)
        self.where = TopicPartition("persistent://public/default/letters")
        if exists:
            self.cluster.create_topic("letters")
        self.clients: list[MemoryBroker] = []
        self.errors: list[KeyShardError] = []
        """Errors that ended a source."""
        self.producers = ScriptedCall()
        """The calls of all clients that open a producer."""
        self.sends = ScriptedCall(answer_lost=True)
        """The calls that send; one that fails is stored and not confirmed."""
        self.readers = ScriptedCall()
        """The calls that open a Reader."""

    def connect(self) -> MemoryBroker:
        client = faulty(MemoryBroker(self.cluster), producer=giving(send=self.sends))
        self.clients.append(faulty(client, producer=self.producers, reader=self.readers))
        return client

    def open(
        self,
        parked: Mapping[str, Any] | None = None,
        *,
        checkpointed: bool = False,
        **changes: Any,
    ) -> DeadLetterStore:
        source = config("orders", **({"acknowledge_timeout_ms": 1_000} | changes))
        return open_dead_letters(
            self.connect(), self.where.topic, source, parked,
            checkpointed=checkpointed, fail=self.errors.append,
        )  # fmt: skip

    def die(self) -> None:
        """SIGKILL the newest client."""
        self.clients[-1].kill()

    def close(self) -> None:
        self.cluster.validate()
        for client in self.clients:
            client.close()

    @property
    def starts(self) -> list[EntryId]:
        """Where Readers began."""
        return [start for _, start, *_ in self.readers.asked]

    @property
    def kept(self) -> int:
        return self.cluster.backlog(self.where, KEEPS)


def dead_letter(
    number: int, key: str = "k", kind: DeadLetterKind = DeadLetterKind.PARKED, by: str = "unit"
) -> DeadLetter:
    message = Message(
        b"%d" % number, key, None, MessageId(7, number, 0), P0.topic, P0.partition,
        PUBLISHED, None, {}, None, redelivered=False,
    )  # fmt: skip
    return DeadLetter(message, by, kind, 3, "broken")


def replay(dead_letters: DeadLetterStore, key: str = "k", most: int = 1_000) -> list[int]:
    """Unpark a key; return the numbers of its replayed dead letters."""
    assert dead_letters.keys.unpark(key)
    first = dead_letters.first(key)
    assert first is not None
    rest = dead_letters.replay(key, first)
    done: list[int] = []
    resting: StoredDeadLetter | None = first
    while resting is not None and len(done) < most:
        dead_letters.done(key, resting)
        done.append(int(present(resting.dead_letter.message.value).split()[0]))
        resting = rest.next()
    return done


def discard(dead_letters: DeadLetterStore, *keys: str) -> int:
    """Discard the dead letters of parked keys; return their number."""
    resting = dead_letters.browser.matching(DeadLetterFilter())
    done = dead_letters.discard({key: resting[key] for key in keys if key in resting})
    return sum(one.dead_letters for one in done)


def large(
    number: int,
    size: int,
    kind: DeadLetterKind = DeadLetterKind.PARKED,
    properties: Mapping[str, str] | None = None,
) -> DeadLetter:
    """A dead letter that is stored in parts."""
    made = dead_letter(number)
    value = b"%d " % number + bytes(size)
    return DeadLetter(
        made.message._replace(value=value, properties=properties or {}), "unit", kind, 3, "no"
    )
