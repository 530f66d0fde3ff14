"""``docs/semantics.md`` links tests that exist, and says of every cell what it is."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "semantics.md").read_text()
TESTS = {
    label: (DOCS / path, name)
    for label, path, name in re.findall(r'^\[(\w+)\]: (\S+) "(\w+)"$', TEXT, re.MULTILINE)
}
USED = set(re.findall(r"\]\[(\w+)\]", TEXT))


def test_every_link_leads_to_a_test() -> None:
    assert len(TESTS) > 20
    for path, name in TESTS.values():
        assert path.name.startswith("test_")
        found = re.search(rf"^(def|class) {name}\b", path.read_text(), re.MULTILINE)
        assert found, f"{path} has no {name}"


def test_every_link_is_defined_and_used() -> None:
    assert set(TESTS) == USED
    defined = re.findall(r"^\[\w+\]: ", TEXT, re.MULTILINE)
    assert len(defined) == len(TESTS), "a definition lacks the name of its test, or is there twice"


def test_every_cell_links_a_test_or_says_that_there_is_none() -> None:
    rows = [line.strip("|").split("|") for line in TEXT.splitlines() if line.startswith("| ")]
    head, *body = rows
    assert [cell.strip() for cell in head] == ["fault", "order", "loss", "twice", "overlap"]
    assert len(body) > 15
    for fault, *cells in body:
        assert len(cells) == 4, fault
        for cell in map(str.strip, cells):
            linked = re.fullmatch(r"\[.+\]\[\w+\]", cell)
            assert linked or cell == "-" or cell.endswith("not shown"), (fault, cell)
