"""A range that receives nothing, while the others do."""

from __future__ import annotations

import pytest

from keyshard.consumers.intake import Intake
from keyshard.consumers.receiver import OwnedRange


def pause_first_range(patch: pytest.MonkeyPatch) -> None:
    """Let the first range of each source receive nothing, until the patch is undone."""
    is_paused = Intake.is_paused

    def paused(intake: Intake, owned_range: OwnedRange) -> bool:
        return owned_range.range_index == 0 or is_paused(intake, owned_range)

    patch.setattr(Intake, "is_paused", paused)
