"""A few topics in a few ways; ``python -m tests.proofs ways --seeds 300`` draws more."""

from __future__ import annotations

import pytest

from tests.support.proof_run import hold

LIMIT_S = 400
SEED = 106
"""Its draws have both producers, and encrypted, malformed, chunked and delayed messages."""


@pytest.mark.broker
@pytest.mark.spark
@pytest.mark.ray
@pytest.mark.timeout(LIMIT_S + 10)
def test_each_value_round_trips_or_is_named() -> None:
    hold("ways", "--seeds", "6", "--seed-start", str(SEED), limit_s=LIMIT_S)
