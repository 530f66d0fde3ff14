"""The pages of guarantees link existing tests; ``docs/semantics.md`` explains every cell."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "semantics.md").read_text()
of_each_page = pytest.mark.parametrize("page", ["semantics.md", "exactly-once.md"])


def linked_tests(text: str) -> dict[str, tuple[Path, str]]:
    """Files and names of the tests that a page links, by label."""
    return {
        label: (DOCS / path, name)
        for label, path, name in re.findall(r'^\[(\w+)\]: (\S+) "(\w+)"$', text, re.MULTILINE)
    }


@of_each_page
def test_every_link_leads_to_a_test(page: str) -> None:
    tests = linked_tests((DOCS / page).read_text())
    assert len(tests) > 20
    for path, name in tests.values():
        assert path.name.startswith("test_")
        found = re.search(rf"^(def|class) {name}\b", path.read_text(), re.MULTILINE)
        assert found, f"{path} has no {name}"


@of_each_page
def test_every_link_is_defined_and_used(page: str) -> None:
    text = (DOCS / page).read_text()
    tests = linked_tests(text)
    assert set(tests) == set(re.findall(r"\]\[(\w+)\]", text))
    defined = re.findall(r"^\[\w+\]: ", text, re.MULTILINE)
    assert len(defined) == len(tests), "a definition lacks the name of its test, or is there twice"


def table_rows(text: str) -> list[list[str]]:
    """The cells of all rows of tables, heads included."""
    return [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]


def test_every_fault_of_sinks_links_a_test() -> None:
    (_, text) = TEXT.split("## Sinks")
    (_, outcome), *body = table_rows(text.split("\n## ")[0])
    assert outcome.strip() == "outcome"
    assert len(body) > 10
    for fault, found in body:
        assert re.search(r"\[.+\]\[\w+\]", found), fault


def test_every_cell_links_a_test_or_is_marked_as_not_shown() -> None:
    rows = table_rows(TEXT.split("## Sinks")[0])
    head, *body = rows
    assert [cell.strip() for cell in head] == ["fault", "order", "loss", "twice", "overlap"]
    assert len(body) > 15
    for fault, *cells in body:
        assert len(cells) == 4, fault
        for cell in map(str.strip, cells):
            linked = re.fullmatch(r"\[.+\]\[\w+\]", cell)
            assert linked or cell == "-" or cell.endswith("not shown"), (fault, cell)
