"""A short run on a scalable topic; ``python -m tests.proofs scalable`` runs longer."""

from __future__ import annotations

import pytest

from tests.support.proof_run import hold
from tests.support.tested_pulsar import PULSAR

SEED, MESSAGES = 4, 8_000
LIMIT_S = 300
"""Longest time of a run; on two idle cores it takes about 30 s."""


@pytest.mark.broker
@pytest.mark.skipif(int(PULSAR.split(".")[0]) < 5, reason="needs scalable topics")
@pytest.mark.timeout(LIMIT_S + 10)
@pytest.mark.parametrize("subject", ["handlers", "stream"])
def test_order_holds_when_segments_change_and_the_program_is_killed(subject: str) -> None:
    output = hold(
        "scalable", "--seed-start", str(SEED), "--messages", str(MESSAGES), "--subject", subject,
        limit_s=LIMIT_S,
    )  # fmt: skip
    assert "1 of 1 seeds hold" in output
