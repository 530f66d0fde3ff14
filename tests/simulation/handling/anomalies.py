"""Malformed dead letters, and encrypted or corrupt entries; each has its own random stream."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from keyshard.broker.memory import Batching, Message
from keyshard.core.position.entry import TopicPartition
from keyshard.errors import KeyShardError, UnreadableEntryError
from tests.simulation.handling.network import is_dead_letters
from tests.simulation.handling.promises import Name

if TYPE_CHECKING:
    from tests.simulation.handling.program import Program
    from tests.simulation.handling.world import HandlerWorld

MALFORMED = 0.25
"""Share of the runs with foreign messages in the dead-letter topic."""
REFUSED = 0.15
"""Share of the runs with entries that are encrypted or corrupt."""
AMONG = 0.15
"""How often one of them, or data of an aborted transaction, lies among what a producer publishes
while faults happen."""
_KINDS = ("encrypted", "corrupt")
_HUGE = "9" * 30
_WRONG: tuple[dict[str, str | None], ...] = (
    {"publishTime": _HUGE}, {"publishTime": f"-{_HUGE}"}, {"publishTime": "soon"},
    {"attempts": "9" * 5_000}, {"messageId": "1:2"}, {"kind": "lost"}, {"oldest": "far away"},
    {"parts": "1:x"}, {"parts": "1:1", "head": "all"}, {"schemaVersion": "new"},
    {"keyBytes": "\u00e9"}, {"kind": "replayed", "messageId": None},
    {"kind": "replayed", "upTo": "1"},
)  # fmt: skip
"""Properties that a dead letter must not have, or lacks."""


class Anomalies:
    """The anomalies of one run.

    Args:
        world: The run.
    """

    def __init__(self, world: HandlerWorld) -> None:
        self._world = world
        random = self._random = Random(f"{world.seed}:oddities")
        self._writes = not world.shape.batches and random.random() < MALFORMED
        self._among = Random(f"{world.seed}:refused")
        refuses = self._among.random() < REFUSED
        choices = ("fail", "skip") if world.shape.batches else ("fail", "skip", "park")
        self._choices = {kind: self._among.choice(choices) for kind in _KINDS if refuses}
        """The outcome of entries of each kind."""
        self._refused: dict[Name, str] = {}
        """Their kinds."""
        self._allowed: set[Program] = set()
        """Programs that saw such an entry and are to skip them from now on."""

    # -- foreign dead letters ----------------------------------------------------------------------

    def between_lives(self, program: Program) -> None:
        """Write foreign messages into the dead-letter topic, if it exists."""
        if not self._writes:
            return
        for where in self._dead_letter_topics(program):
            for _ in range(self._random.randint(0, 2)):
                own = self._random.random() < 0.7
                subscription = program.name if own else f"{program.name}-of-others"
                self._world.cluster.publish(where, self._malformed(subscription))
                program.malformed += own
                program.record.note(f"FAULT a malformed dead letter of {subscription}")
            if self._among.random() < 0.2:
                kind = self._among.choice(_KINDS)
                message = Message(b"no letter", key="k0")
                self._world.cluster.publish(
                    where, message, encrypted=kind == "encrypted", corrupt=kind == "corrupt"
                )
                program.malformed += 1
                program.record.note(f"FAULT {kind} entry among dead letters")
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

    # -- entries that are refused ------------------------------------------------------------------

    @property
    def refuses(self) -> bool:
        """Whether some entries are refused."""
        return bool(self._choices)

    def options(self, program: Program) -> dict[str, Any]:
        """Return the options ``on_...`` for the source of a program's next life."""
        return {f"on_{kind}": self._choice(program, kind) for kind in self._choices}

    def _choice(self, program: Program, kind: str) -> str:
        choice = self._choices[kind]
        return "skip" if choice == "fail" and program in self._allowed else choice

    def among(self) -> None:
        """Sometimes publish a refused entry among the messages of a producer."""
        if self._choices and self._among.random() < AMONG:
            self._publish()

    def publish(self) -> None:
        """Publish some refused entries at the end."""
        for _ in range(self._among.randint(1, 5) if self._choices else 0):
            self._publish()

    def _publish(self) -> None:
        world, random = self._world, self._among
        cluster, topic = world.cluster, random.choice(world.topics)
        kind = random.choice((*_KINDS, "aborted"))
        key = f"k{random.randrange(world.shape.keys)}"
        messages = [Message(b"refused", key=key)] * random.choice((1, 1, 3))
        if kind == "aborted":
            cluster.publish_aborted(random.choice(world.open_ones(topic)), *messages)
            return
        for where, entry_id in cluster.publish(
            topic, *messages, batching=Batching.BY_KEY,
            encrypted=kind == "encrypted", corrupt=kind == "corrupt",
        ):  # fmt: skip
            self._refused[Name.of(where, entry_id)] = kind
            world.note(f"FAULT {kind} entry {entry_id} of {where}")

    @property
    def refused(self) -> set[Name]:
        """The refused entries, by their first messages."""
        return set(self._refused)

    def is_refused(self, name: Name) -> bool:
        """Whether a message holds the stored bytes of a refused entry."""
        return name in self._refused

    def acked(self, program: Program, name: Name) -> bool:
        """Judge the acknowledgement of an entry; return whether the entry is a refused one."""
        kind = self._refused.get(name)
        if kind is None:
            return False
        choice = self._choice(program, kind)
        if choice == "fail" or (choice == "park" and name not in program.promises.kept.values()):
            program.promises.broken = f"{name} is {kind}, and was acknowledged"
        return True

    def ends(self, program: Program, error: KeyShardError) -> bool:
        """Return whether an error is that of a refused entry. If so, skip these from now on."""
        if not isinstance(error, UnreadableEntryError) or "fail" not in self._choices.values():
            return False
        self._allowed.add(program)
        return True

    def broken(self, program: Program) -> str:
        """Promises that do not hold at the end."""
        refused = {
            name: kind for name, kind in self._refused.items()
            if self._world.starts.is_owed(name)
        }  # fmt: skip
        choices = {kind: self._choice(program, kind) for kind in refused.values()}
        if "fail" in choices.values():
            return f"{program.name} did not end at a refused entry"
        parked = {name for name, kind in refused.items() if choices[kind] == "park"}
        if left := parked - {*program.promises.kept.values()}:
            return f"{len(left)} refused entries are no dead letters of {program.name}"
        return ""
