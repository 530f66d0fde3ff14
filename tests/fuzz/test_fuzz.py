"""The public API keeps its promises under hostile input; ``make simulate`` runs many more."""

from __future__ import annotations

import os
import time

import pytest

from tests.fuzz.promises import BrokenPromiseError, promise_in_time
from tests.fuzz.runner import TARGETS, run_seeds
from tests.proofs.runner import failure, repeats
from tests.support.deadlines import DeadlineError

SEEDS = 20 * len(TARGETS)


def test_no_attack_on_the_public_api_breaks_a_promise() -> None:
    broken = [
        failure(one, repeats("fuzz", one.seed))
        for one in run_seeds(0, SEEDS, len(os.sched_getaffinity(0)))
        if one.error
    ]
    assert not broken, "\n".join(broken)


def test_a_promise_that_came_too_late_is_no_verdict_and_any_other_is_one() -> None:
    promise_in_time([4], 0.0, "all came")
    with pytest.raises(DeadlineError, match="3 of 4"):
        promise_in_time([], 0.0, "3 of 4")
    with pytest.raises(BrokenPromiseError, match="3 of 4"):
        promise_in_time([], time.monotonic() + 3_600, "3 of 4")
