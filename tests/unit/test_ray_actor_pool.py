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
from keyshard.errors import ClusterError, HandlerProcessError
from ray_adapter import actor_pool, cluster
from ray_adapter.actor_pool import ActorPool
from ray_adapter.cluster import Actor, JobCancelled
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
        return SimpleNamespace(ask=_answered, end=lambda: None, handle=object())

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


class Dying(Away):
    """Actors of which Ray restarts none, and of which some die while they start."""

    def __init__(self, dead: int, *, given_up: bool = False) -> None:
        super().__init__(0.0)
        self.handler_name = "app.handle"
        self._dead = dead
        self._given_up = lambda: given_up
        self.made: list[Actor] = []

    def _made(self) -> Any:
        actor = Actor(self.session, object)
        self.made.append(actor)
        return actor

    def _placed(self, actors: Sequence[Actor], deadline_s: float, *, soon: bool) -> None:  # noqa: ARG002
        for actor in actors:
            if actor.handle is None:
                raise JobCancelled
            if self.made.index(actor) < self._dead:
                raise exceptions.ActorDiedError


def test_an_actor_is_replaced_also_if_its_replacement_died_while_it_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its feeder ended without an error then, and its rows waited for ever."""
    monkeypatch.setattr("ray.kill", lambda *_, **__: None)
    pool = Dying(2)
    actor = pool._made()
    with pytest.raises(HandlerProcessError):
        pool.again(actor)
    assert pool.again(actor) is pool.made[2]
    assert [one.handle is None for one in pool.made] == [True, True, False]


def test_an_actor_is_not_replaced_while_its_job_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.kill", lambda *_, **__: None)
    pool = Dying(0, given_up=True)
    actor = pool._made()
    actor.end()
    with pytest.raises(JobCancelled):
        pool.again(actor)
    assert pool.made == [actor]
