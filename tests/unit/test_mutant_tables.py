"""The tables of mutants fit the code, so that a change of the code cannot silence them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.mutants.mutant import ROOT, Mutant, changed
from tests.mutants.test_mutants import ALL
from tests.support.deadlines import deadline
from tests.support.kinds import ALL_TESTS


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_a_mutant_names_code_and_tests_that_exist(mutant: Mutant) -> None:
    for edit in mutant.edits:
        changed((ROOT / edit.file).read_text(), edit)
    for killer in mutant.killers:
        file, *names = killer.split("::")
        text = (ROOT / file).read_text()
        for name in names:
            assert f" {name.partition('[')[0]}(" in text, killer


def test_every_killer_is_a_test_with_its_parameters(pytestconfig: pytest.Config) -> None:
    killers = sorted({killer for mutant in ALL for killer in mutant.killers})
    tests = pytestconfig.stash.get(ALL_TESTS, None) or collected(killers)
    ends = ("[", "::")
    named = {*tests, *(test.partition(end)[0] for test in tests for end in ends)}
    assert [killer for killer in killers if killer not in named] == []


def collected(asked: list[str]) -> list[str]:
    """Collect tests in another process, which takes several seconds."""
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *asked],
        cwd=ROOT, capture_output=True, text=True, timeout=deadline(120), check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout[-2_000:]
    return found.stdout.splitlines()
