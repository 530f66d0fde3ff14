"""Avro's Java reader reads versions of schemas as the unit tests say, and as keyshard does."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.support.avro_java_reader import ask
from tests.support.avro_versions import CASES, REFUSED, drawn, load, read

pytestmark = pytest.mark.broker


def test_the_kept_answers_are_those_of_the_java_reader(tmp_path: Path) -> None:
    assert ask(tmp_path, CASES) == load()


@pytest.mark.parametrize("seed", range(3))
def test_drawn_versions_are_read_as_the_java_reader_reads_them(tmp_path: Path, seed: int) -> None:
    cases = {one.name: one for one in drawn(Random(seed), 500)}
    differing = [
        (case.written, case.wanted, mine, one.found)
        for one in ask(tmp_path, list(cases.values()))
        if (mine := read(case := cases[one.name], one.value)) != one.found and one.found != REFUSED
    ]
    assert not differing
