"""The cost of coordination follows the number of changes, not the size of the source.

``python -m bench scale_sim`` runs the same with 10,000 ranges, 1,000 topic partitions and 1,000
workers.
"""

from __future__ import annotations

import re
from operator import itemgetter
from pathlib import Path

from bench.scale_sim import cuts, death, moves, run

DOCS = Path(__file__).parents[2] / "docs/scaling.md"
LOST = "death_lost_ms"

SMALL, LARGE = 30, 300
"""Topic partitions."""


def test_a_small_run_has_every_figure_that_the_docs_name() -> None:
    figures = run(ranges=60, partitions=4, workers=6)
    named = re.findall(r"\(`([a-z_*]+_(?:ms|us|mb|bytes|slots))`\)", DOCS.read_text())
    assert len(named) > 8
    for name in named:
        assert any(re.fullmatch(name.replace("*", ".*"), one) for one in figures), name
    # The cost of one entry is a difference of two times. A small run cannot measure it.
    assert all(value >= 0 for name, value in figures.items() if name != "cut_entry_us")
    assert figures["plan_workers_moved_slots"] == figures["plan_workers_fewest_slots"]
    assert figures["plan_ranges_moved_slots"] == figures["plan_ranges_fewest_slots"]
    assert figures["death_consumers"] == figures["death_subscribed_again"] == 10 * 4


def test_cuts_and_commits_grow_with_the_topic_partitions_that_they_touch() -> None:
    small, large = cuts(100, SMALL), cuts(100, LARGE)
    for name in ("cut_all_ms", "commit_all_ms", "checkpoint_bytes"):
        assert large[name] < 30 * small[name], f"{name} grows faster than what is touched"
    for name in ("cut_one_ms", "commit_one_ms"):
        assert large[name] < large[name.replace("one", "all")] / 5, f"{name}: others are touched"
    assert large["checkpoint_gap_bytes"] < 24


def test_an_owner_that_goes_costs_the_same_however_many_topic_partitions_wait() -> None:
    small, large = moves(100, SMALL, 20), moves(100, LARGE, 20)
    assert large["reassign_ms"] < 4 * small["reassign_ms"], "the ring is walked for each of them"


def test_a_dead_worker_is_forgotten_while_others_have_work() -> None:
    few = death(1_000, 100, 100, held=20)
    many = min((death(1_000, 100, 100, held=2_000) for _ in range(2)), key=itemgetter(LOST))
    assert few["death_consumers"] == many["death_consumers"] == 1_000
    assert many[LOST] < 8 * few[LOST], "what others have in hand is walked through"
