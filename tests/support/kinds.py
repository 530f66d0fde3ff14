"""The kind of each test: the gate, or what runs when somebody asks for it.

``pytest --kind gate`` selects by it, and so do the targets of the Makefile.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

KINDS = {
    "gate": "needs no broker, no JVM and no Ray, and passes on a busy machine",
    "real": "the part of the gate that has a real broker, Spark and Ray, in one process",
    "clock": "needs no broker, and takes long, needs a browser or measures elapsed time",
    "broker": "needs a real broker",
    "spark": "needs Spark and a real broker",
    "ray": "needs Ray",
    "proofs": "chaos, random searches, mutants and measured memory",
}
ALL_TESTS = pytest.StashKey[frozenset[str]]()
"""Node ids of all tests, of any kind, in the configuration of a run that collects all of them."""
PROOFS = ("tests/chaos/", "tests/memory/", "tests/mutants/", "tests/streams/", "tests/ways/")
"""Folders of proofs."""
GATE = Path(__file__).parents[1] / "gate.toml"
"""Tests that are in the gate or outside although their folder and markers say otherwise."""


def read_toml(file: Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return dict(toml.loads(file.read_text()))


@cache
def _lists() -> dict[str, Any]:
    return read_toml(GATE)


@cache
def real() -> frozenset[str]:
    """Node ids of the real part of the gate."""
    return frozenset(_lists()["real"])


def outside() -> list[dict[str, str]]:
    """Tests outside the gate: ``test`` (the start of a node id), ``kind`` and ``reason``."""
    return list(_lists()["outside"])


def kind_of(test: str, markers: Collection[str]) -> str:
    """The kind of a test.

    Args:
        test: Its node id.
        markers: Names of its markers.

    Returns:
        A key of ``KINDS``.
    """
    if test in real():
        return "real"
    if test.startswith(PROOFS):
        return "proofs"
    for needed in ("ray", "spark", "broker"):
        if test.startswith(f"tests/{needed}/") or needed in markers:
            return needed
    listed = (one["kind"] for one in outside() if test.startswith(one["test"]))
    return next(listed, "gate")


def kind_of_item(item: pytest.Item) -> str:
    """The kind of a collected test, a key of ``KINDS``."""
    return kind_of(item.nodeid, {marker.name for marker in item.iter_markers()})
