"""Versions of Avro schemas that name their types otherwise, read as Avro's Java reader does."""

from __future__ import annotations

import re

import pytest

from tests.support.avro_versions import CASES, REFUSED, load, read

ANSWERS = load()
BY_NAME = {one.name: one for one in CASES}
FAMILIES = sorted({one.name.partition(":")[0] for one in CASES})


def test_each_case_has_an_answer() -> None:
    assert {one.name for one in ANSWERS} == BY_NAME.keys()


ALSO_READ = re.compile(
    r"(alias elsewhere|no space, alias|space|spaces, turned)$"
    r"|field alias: \w+, required, (short|space)$"
)
"""Cases that Java's reader may refuse, although the short name or an alias is the same."""
BY_ALIAS = re.compile(r"field alias: \w+, default, (short|space)$")
"""Cases in which Java's reader takes the default of a field, although its alias was written."""


@pytest.mark.parametrize("family", FAMILIES)
def test_types_with_other_names_are_read_as_avros_java_reader_reads_them(family: str) -> None:
    compared = [one for one in ANSWERS if one.name.partition(":")[0] == family]
    ours = [read(BY_NAME[one.name], one.value) for one in compared]
    differing = {
        one.name: (mine, one.found)
        for one, mine in zip(compared, ours, strict=True)
        if mine != one.found
        and not (one.found == REFUSED and ALSO_READ.search(one.name))
        and not BY_ALIAS.search(one.name)
    }
    assert not differing
