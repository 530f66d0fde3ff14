"""The thread of a worker in an actor of Ray."""

from __future__ import annotations

import os

import pytest

from ray_adapter import worker_actors


class LeftError(Exception):
    """Stands for the end of the process."""


def test_an_actor_whose_worker_breaks_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its consumers kept their ranges after the end of the lease, which nothing watched."""

    def leave(status: int) -> None:
        raise LeftError(status)

    def broken() -> bool:
        raise ZeroDivisionError("in the thread of an actor")

    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(LeftError, match="1"):
        worker_actors._serve(broken)
    assert "in the thread of an actor" in caplog.text
    with pytest.raises(LeftError, match="1"):
        worker_actors._serve(lambda: False)
    worker_actors._serve(lambda: True)
