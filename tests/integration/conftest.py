"""Bookies of tests that read them."""

from __future__ import annotations

import pytest

from keyshard.bookkeeper import bookies, failures


@pytest.fixture
def patient_bookies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine delays answers; no test remembers the failures of another one.

    Ledgers of another broker may have the same numbers.
    """
    monkeypatch.setattr(bookies, "SILENT_S", 8.0)
    monkeypatch.setattr(failures, "OF_PROCESS", failures.Failures())
