"""CONTRIBUTING.md names the home of each promise: where its tests are."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
TEXT = (TESTS.parent / "CONTRIBUTING.md").read_text()
LISTED = ("runtime", "integration", "spark", "ray")
"""Folders whose files each have a row."""


def homes() -> list[tuple[str, list[str]]]:
    """Promises, and the patterns of the files that prove each."""
    (_, section) = TEXT.split("### One promise, one home\n")
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if "| `" in line]
    return [(promise, re.findall(r"`([^`]+)`", " ".join(rest))) for promise, *rest in rows]


def files(pattern: str) -> list[str]:
    """Files of tests that a pattern of the table stands for."""
    folder, _, name = pattern.partition("/")
    return [f"{folder}/{one.name}" for one in (TESTS / folder).glob(f"test_{name}.py")]


def test_each_home_exists() -> None:
    found = homes()
    assert 25 < len(found) <= 60
    for promise, patterns in found:
        for pattern in patterns:
            assert files(pattern), f"{promise}: no file {pattern}"


def test_each_file_of_a_tier_is_the_home_of_one_promise() -> None:
    listed = [one for _, patterns in homes() for pattern in patterns for one in files(pattern)]
    expected = [one for folder in LISTED for one in files(f"{folder}/*")]
    assert sorted(one for one in listed if one.startswith(LISTED)) == sorted(expected)
