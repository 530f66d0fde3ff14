"""Subscriptions of a program with handlers that are deleted between two of its lives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keyshard.core.position.entry import TopicPartition
from keyshard.errors import DataLossTrimmedError, KeyShardError
from tests.simulation.deletions import Deletions

if TYPE_CHECKING:
    from tests.simulation.handling.program import Program
    from tests.simulation.handling.world import HandlerWorld


class HandlerDeletions:
    """The deletions of one run. Only a program with a checkpoint knows what it had done.

    Args:
        world: The run.
    """

    def __init__(self, world: HandlerWorld) -> None:
        self._world = world
        self._deletions = Deletions(world.seed)
        self._owed: set[TopicPartition] = set()
        """Topic partitions whose loss the next whole start must name."""
        self._accepted = False
        """Whether a loss was named: ``fail_on_data_loss`` is false from then on."""

    def between_lives(self, program: Program) -> None:
        """Perhaps delete subscriptions that the newest checkpoint knows."""
        world, saved = self._world, program.promises.saved_checkpoint
        if saved is None or world.shape.neighbour:
            return
        # A refused entry that is gone would have no outcome.
        may_trim = world.shape.admin and not world.anomalies.refuses
        for where, trimmed in self._deletions.between_lives(
            world.cluster, program.name, saved.partitions, may_trim=may_trim
        ):
            program.record.note(
                f"FAULT the subscription of {where} is deleted, and {len(trimmed)} entries"
            )
            state = saved.partitions[where]
            world.starts.debts.delete_subscription(where, state)
            first = state.floor or state.delivered.first
            for entry in trimmed:
                if state.covers(entry.id):
                    continue
                world.starts.debts.skip(where, entry.id, range(len(entry.messages)))
                if first is not None and entry.id > first and not entry.hidden:
                    self._owed.add(where)

    def options(self) -> dict[str, Any]:
        """Options of the source of the next life."""
        return {"fail_on_data_loss": False} if self._accepted else {}

    def names(self, error: KeyShardError) -> bool:
        """Whether an error names such a loss; from then on losses are accepted."""
        if self._accepted or not isinstance(error, DataLossTrimmedError):
            return False
        where = TopicPartition.parse(str(error.facts["topic_partition"]))
        self._accepted = where in self._deletions.trimmed
        self._owed.clear()
        return self._accepted

    @property
    def broken(self) -> str:
        """The promise that does not hold: a loss that no start named."""
        if self._accepted or not self._owed:
            return ""
        return f"entries of {min(self._owed)} were deleted, and no error names them"
