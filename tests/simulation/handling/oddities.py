"""Malformed dead letters and encrypted entries, drawn from a random stream of their own."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from keyshard.broker.memory import Message
from keyshard.core.position.entry import TopicPartition
from keyshard.errors import EncryptedMessageError, KeyShardError
from tests.simulation.handling.network import is_dead_letters
from tests.simulation.handling.promises import Name

if TYPE_CHECKING:
    from tests.simulation.handling.program import Program
    from tests.simulation.handling.world import HandlerWorld

MALFORMED = 0.25
"""Share of the runs in whose dead-letter topic others write."""
ENCRYPTED = 0.1
"""Share of the runs with encrypted entries."""
_HUGE = "9" * 30
_WRONG: tuple[dict[str, str | None], ...] = (
    {"publishTime": _HUGE}, {"publishTime": f"-{_HUGE}"}, {"publishTime": "soon"},
    {"attempts": "9" * 5_000}, {"messageId": "1:2"}, {"kind": "lost"}, {"oldest": "far away"},
    {"parts": "1:x"}, {"parts": "1:1", "head": "all"}, {"schemaVersion": "new"},
    {"keyBytes": "\u00e9"}, {"kind": "replayed", "messageId": None},
    {"kind": "replayed", "upTo": "1"},
)  # fmt: skip
"""Properties that a letter must not have, or lacks."""


class Oddities:
    """Of one run.

    Args:
        world: Where they are published.
    """

    def __init__(self, world: HandlerWorld) -> None:
        self._world = world
        random = self._random = Random(f"{world.seed}:oddities")
        self._writes = not world.shape.batches and random.random() < MALFORMED
        encrypts = not world.shape.batches and random.random() < ENCRYPTED
        self._on_encrypted = random.choice(("fail", "skip", "park")) if encrypts else ""
        self._encrypted: set[Name] = set()
        self._allowed: set[Program] = set()
        """Programs that saw an encrypted entry and are to skip them from now on."""

    # -- dead letters that others write ------------------------------------------------------------

    def between_lives(self, program: Program) -> None:
        """Others write into the dead-letter topic, if there is one."""
        if not self._writes:
            return
        for where in self._dead_letter_topics(program):
            for _ in range(self._random.randint(0, 2)):
                own = self._random.random() < 0.7
                subscription = program.name if own else f"{program.name}-of-others"
                self._world.cluster.publish(where, self._malformed(subscription))
                program.malformed += own
                program.record.note(f"FAULT a malformed dead letter of {subscription}")
            if self._random.random() < 0.3:
                self._world.cluster.publish(where, Message(b"no letter", key="k0"))
                program.record.note("FAULT no dead letter at all")

    def _dead_letter_topics(self, program: Program) -> list[TopicPartition]:
        cluster, subscription = self._world.cluster, f"{program.name}-parked"
        every = (where for parts in cluster.topics().values() for where in parts)
        return [
            one
            for one in every
            if is_dead_letters(one) and subscription in cluster.subscriptions(one)
        ]

    def _malformed(self, subscription: str) -> Message:
        properties: dict[str, str | None] = {
            "kind": "parked", "subscription": subscription, "topic": self._world.topics[0],
            "partition": "0", "messageId": "1:2:0", "publishTime": "1", "attempts": "1",
            "error": "", "parts": "", "head": "2",
        }  # fmt: skip
        properties |= self._random.choice(_WRONG)
        told = {f"keyshard.{name}": text for name, text in properties.items() if text is not None}
        return Message(b"k0:0", key="k0", properties=told)

    # -- encrypted entries -------------------------------------------------------------------------

    def options(self, program: Program) -> dict[str, Any]:
        """Of the source of the next life."""
        if not self._on_encrypted:
            return {}
        return {"on_encrypted": "skip" if program in self._allowed else self._on_encrypted}

    def publish(self) -> None:
        """Publish encrypted entries."""
        world, random = self._world, self._random
        for _ in range(random.randint(1, 5) if self._on_encrypted else 0):
            topic = random.choice(world.topics)
            message = Message(b"secret", key=f"k{random.randrange(world.shape.keys)}")
            for where, entry_id in world.cluster.publish(topic, message, encrypted=True):
                self._encrypted.add(Name.of(where, entry_id))
                world.note(f"FAULT encrypted entry {entry_id} of {where}")

    def is_encrypted(self, name: Name) -> bool:
        """Whether a message is what is stored of an encrypted entry."""
        return name in self._encrypted

    def acked(self, program: Program, name: Name) -> bool:
        """An entry is acknowledged; whether it is encrypted."""
        if name not in self._encrypted:
            return False
        if self._on_encrypted == "park":
            may = name in program.promises.kept.values()
        else:
            may = self._on_encrypted == "skip" or program in self._allowed
        if not may:
            program.promises.broken = f"{name} is encrypted, and was acknowledged"
        return True

    def ends(self, program: Program, error: KeyShardError) -> bool:
        """Whether an error is that of an encrypted entry; from now on these are skipped."""
        if not isinstance(error, EncryptedMessageError) or self._on_encrypted != "fail":
            return False
        self._allowed.add(program)
        return True

    def broken(self, program: Program) -> str:
        """What does not hold at the end."""
        if self._encrypted and self._on_encrypted == "fail" and program not in self._allowed:
            return f"{program.name} did not end at an encrypted entry"
        left = self._encrypted - {*program.promises.kept.values()}
        if left and self._on_encrypted == "park":
            return f"{len(left)} encrypted entries are no dead letters of {program.name}"
        return ""
