"""A broken promise turns a run of its kind red: no fixture, second run or report swallows it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.mutants.batch_mutants import OF_BATCHES
from tests.mutants.mutant import Edit, changed, copy_code
from tests.support.deadlines import deadline

(ACKNOWLEDGE_EARLY,) = next(
    one.edits for one in OF_BATCHES if one.name.startswith("acknowledge at the cut")
)
LOSE_ENTRIES = Edit(
    "keyshard/broker/wire/consumer.py",
    "        return self.accept_decoded(decoded, entries)\n\n    def _proved(",
    "        return self.accept_decoded(decoded, entries)[1:]\n\n    def _proved(",
)
ACKNOWLEDGE_NOTHING = Edit(
    "keyshard/broker/wire/consumer.py", "        self._acks.add(entries)\n", ""
)
REVERSE_RESULTS = Edit(
    "ray_adapter/feeding.py",
    "                results += outcome.results\n",
    "                results += outcome.results[::-1]\n",
)
OVERTAKE = Edit(
    "keyshard/core/lanes/lanes.py",
    "            queue.work.append(work)\n",
    "            queue.work.insert(min(1, len(queue.work)), work)\n",
)
KEEP_WHAT_IS_GONE = Edit(
    "keyshard/core/window/window.py", "            del self.known[topic_partition]\n", ""
)
LIMIT_S = 300


@dataclass(frozen=True)
class Canary:
    """A change of the code that breaks a promise, and a test of one kind that must fail."""

    kind: str
    edit: Edit
    test: str
    """Its node id below ``tests``."""


CANARIES = (
    Canary(
        "gate",
        ACKNOWLEDGE_EARLY,
        "unit/test_stream_reader.py::test_async_progress_is_refused_with_nothing_acknowledged",
    ),
    Canary(
        "real",
        LOSE_ENTRIES,
        "contract/test_reader.py"
        "::test_a_reader_gives_whole_entries_in_order_from_its_start[wire-2]",
    ),
    Canary(
        "clock",
        KEEP_WHAT_IS_GONE,
        "scale/test_window.py::test_a_gone_topic_partition_without_any_row_is_forgotten_at_once",
    ),
    Canary(
        "broker",
        ACKNOWLEDGE_NOTHING,
        "contract/test_acknowledge.py"
        "::test_acknowledged_entries_do_not_come_again_after_close[wire]",
    ),
    Canary(
        "spark",
        ACKNOWLEDGE_EARLY,
        "spark/test_ack_point.py"
        "::test_acknowledgements_follow_the_commit_log_and_an_idle_backlog_reaches_zero",
    ),
    Canary(
        "ray",
        REVERSE_RESULTS,
        "ray/test_run.py::test_unacknowledged_messages_of_a_caller_that_leaves_come_again",
    ),
    Canary(
        "proofs",
        OVERTAKE,
        "simulation/test_handling.py::test_the_promises_of_handlers_hold",
    ),
)
NEEDS = ("broker", "spark", "ray")
"""Kinds of tests that a marker gives. ``tests/gate.toml`` names the canaries of other kinds."""


def one_of_its_kind(canary: Canary) -> object:
    """Return a test parameter for a canary, with the marker of its kind if the kind has one."""
    marks = [getattr(pytest.mark, canary.kind)] if canary.kind in NEEDS else []
    return pytest.param(canary, id=canary.kind, marks=marks)


@pytest.mark.timeout(LIMIT_S + 10)
@pytest.mark.parametrize("canary", [one_of_its_kind(canary) for canary in CANARIES])
def test_a_broken_promise_turns_a_run_red(canary: Canary, tmp_path: Path) -> None:
    copy_code(tmp_path)
    broken = tmp_path / canary.edit.file
    broken.write_text(changed(broken.read_text(), canary.edit))
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "--kind", canary.kind, "-p", "no:cacheprovider",
         f"tests/{canary.test}"],
        cwd=tmp_path, env=environment | {"PYTHONPATH": str(tmp_path)}, check=False,
        timeout=deadline(LIMIT_S), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    print(run.stdout)
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout
    assert " 1 failed in " in run.stdout.splitlines()[-1], run.stdout
    assert "second run of " not in run.stdout
