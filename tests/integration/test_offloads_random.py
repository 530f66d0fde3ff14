"""Random programs whose ledgers are offloaded: a read from the store has the rows of the broker.

A failure prints its seed. ``python -m tests.integration.test_offloads_random --seeds 100`` draws
more of them, and ``--seeds 1 --seed-start N`` repeats one. The number of a seed decides its store.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.integration.segment_programs import fillers
from tests.integration.test_segments_random import checked, holds
from tests.support.offloaders import STORES, offloading_broker

pytestmark = [
    pytest.mark.broker,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("patient_bookies"),
]

SEEDS = 2
"""Programs for each store."""
LEDGER_ENTRIES = 20


def test_reads_from_the_store_have_the_rows_of_the_broker(tmp_path: Path) -> None:
    origins: Counter[str] = Counter()
    with (
        offloading_broker(tmp_path, ledger_entries=LEDGER_ENTRIES) as stores,
        fillers(stores.broker) as clients,
    ):
        for seed in range(SEEDS * len(STORES)):
            checked(seed, stores.broker, clients, origins, stores)
    for by in ("auto, offloads", "bookies, offloads", "broker, offloads"):
        assert min(origins[f"{by}: store"], origins[f"{by}: broker"]) > 20, origins


def main() -> int:
    """Run seeds, and print what fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many (default: 100)")
    parser.add_argument("--seed-start", type=int, default=0, help="the first one (default: 0)")
    given = parser.parse_args()
    origins: Counter[str] = Counter()
    failed = 0
    with ExitStack() as opened:
        folder = Path(opened.enter_context(TemporaryDirectory()))
        stores = opened.enter_context(offloading_broker(folder, ledger_entries=LEDGER_ENTRIES))
        clients = opened.enter_context(fillers(stores.broker))
        for seed in range(given.seed_start, given.seed_start + given.seeds):
            failed += not holds(seed, stores.broker, clients, origins, stores)
    print(f"{given.seeds} programs, {failed} failed; entries {dict(origins)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
