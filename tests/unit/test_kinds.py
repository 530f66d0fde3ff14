"""The lists of the gate name tests that exist, and each test has one kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.deadlines import FACTOR, FACTOR_MAX, deadline
from tests.support.kinds import KINDS, kind_of, outside, real

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("test", [*sorted(real()), *(one["test"] for one in outside())])
def test_a_listed_test_exists(test: str) -> None:
    file, _, function = test.partition("::")
    assert (ROOT / file).exists()
    if function:
        name = function.partition("[")[0].rpartition("::")[2]
        assert f"def {name}(" in (ROOT / file).read_text()


def test_a_test_outside_the_gate_has_a_kind_and_a_reason() -> None:
    for one in outside():
        assert one["kind"] in KINDS.keys() - {"gate", "real"}, one
        assert one["reason"], one


@pytest.mark.parametrize(
    ("test", "markers", "kind"),
    [
        ("tests/unit/test_window.py::test_a", set(), "gate"),
        ("tests/runtime/test_parking.py::test_a", {"timeout"}, "gate"),
        ("tests/integration/test_wire.py::test_a", {"broker"}, "broker"),
        ("tests/integration/test_readme.py::test_a", {"broker", "spark", "ray"}, "ray"),
        ("tests/spark/test_triggers.py::test_a", {"broker"}, "spark"),
        ("tests/chaos/test_chaos.py::test_a", {"broker"}, "proofs"),
        ("tests/scale/test_window.py::test_a", set(), "clock"),
        (min(real()), {"broker"}, "real"),
    ],
)
def test_the_kind_follows_from_lists_folder_and_markers(
    test: str, markers: set[str], kind: str
) -> None:
    assert kind_of(test, markers) == kind


def test_a_deadline_is_scaled_by_the_factor_of_the_machine() -> None:
    assert 1.0 <= FACTOR <= FACTOR_MAX
    assert deadline(2.0) == 2.0 * FACTOR
