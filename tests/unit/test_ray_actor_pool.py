"""How long a job of Ray waits for a place of its actors, at its start and after a death."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from ray import exceptions

import keyshard
from keyshard.errors import ClusterError
from ray_adapter import actor_pool, cluster
from ray_adapter.actor_pool import ActorPool
from ray_adapter.options import JobOptions

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")


class Away(ActorPool):
    """Actors whose node is away for a while."""

    def __init__(self, away_s: float) -> None:
        self._options = JobOptions(parallelism=1, num_gpus=1)
        self._traces = False
        self.session = SimpleNamespace(  # type: ignore[assignment]
            check=lambda: None, inside=nullcontext
        )
        self._back_s = time.monotonic() + away_s

    def _ready(self, refs: Sequence[Future[Any]], deadline_s: float) -> list[Future[Any]]:
        back = deadline_s >= self._back_s
        return list(refs) if back else []

    def _made(self) -> Any:
        return SimpleNamespace(ask=_answered, end=lambda: None)

    def _loaded(self, actors: Any, deadline_s: float) -> None:  # noqa: ARG002
        assert time.monotonic() < deadline_s


def _answered(method: str) -> Future[Any]:
    assert method == "version"
    answer: Future[Any] = Future()
    answer.set_result(keyshard.__version__)
    return answer


@pytest.fixture(autouse=True)
def no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_pool, "fits_nowhere", lambda _: True)
    monkeypatch.setattr(cluster, "fits_nowhere", lambda _: True)
    monkeypatch.setattr(cluster, "capacity", lambda: "It has nothing.")


def test_a_job_that_begins_where_no_node_fits_ends_soon() -> None:
    with pytest.raises(ClusterError, match="No node of the cluster has"):
        Away(30.0).start(1)


@pytest.mark.parametrize("killed", [False, True])
def test_a_job_waits_for_a_node_that_is_gone_for_as_long_as_it_may(killed: bool) -> None:
    """It ended 5 s after its only node with a GPU was gone, also where that came back soon."""
    away, actor = Away(30.0), Away(0.0)._made()
    if killed:
        dead = [True]
        placed = away._placed

        def once_dead(*given: Any, **how: Any) -> None:
            if dead and dead.pop():
                raise exceptions.ActorDiedError
            placed(*given, **how)

        away._placed = once_dead  # type: ignore[method-assign]
    assert (away.again(actor) is actor) is not killed
    with pytest.raises(ClusterError, match="No node of the cluster has"):
        Away(100.0).again(actor)
