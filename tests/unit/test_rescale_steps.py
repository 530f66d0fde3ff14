"""The table of a rescale: where it ends, whatever fails on the way."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest

from keyshard.coordinator.rescale import TRANSITIONS, Step, _walk


def walked(failing: Collection[Step]) -> tuple[list[Step], Step]:
    """Steps that were taken, and the end, where some steps fail."""
    taken: list[Step] = []

    def action(step: Step) -> Callable[[], None]:
        def act() -> None:
            taken.append(step)
            if step in failing:
                raise ConnectionError(step.name)

        return act

    end, errors = _walk({step: action(step) for step in TRANSITIONS})
    assert errors.keys() == set(failing) & set(taken)
    return taken, end


@pytest.mark.parametrize(
    ("failing", "taken", "end"),
    [
        ((), (Step.DRAIN, Step.EXCHANGE, Step.ADOPT), Step.MOVED),
        ((Step.DRAIN,), (Step.DRAIN,), Step.KEPT),
        ((Step.EXCHANGE,), (Step.DRAIN, Step.EXCHANGE, Step.RESTORE), Step.KEPT),
        (
            (Step.EXCHANGE, Step.RESTORE),
            (Step.DRAIN, Step.EXCHANGE, Step.RESTORE),
            Step.LOST,
        ),
        ((Step.ADOPT,), (Step.DRAIN, Step.EXCHANGE, Step.ADOPT), Step.LOST),
    ],
)
def test_whatever_fails_the_ring_is_moved_kept_or_reported_as_lost(
    failing: Collection[Step], taken: Collection[Step], end: Step
) -> None:
    assert walked(failing) == (list(taken), end)
