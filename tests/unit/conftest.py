"""Scripted brokers and bookies, connections to them, and quick calls of the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import typer.main

from keyshard.bookkeeper import bookies
from keyshard.broker import retry
from keyshard.broker.wire import consumer as consuming
from keyshard.broker.wire import keep_alive
from keyshard.broker.wire.broker import WireBroker
from keyshard.config.connection import Connection
from keyshard.core import refusal_timer
from tests.refusals.broker import Cluster, ScriptedBroker
from tests.support import scripted_bookie
from tests.support.answering_broker import ScriptedBroker as AnsweringBroker
from tests.support.deadlines import deadline


@pytest.fixture(scope="session", autouse=True)
def _commands_built_once() -> Iterator[None]:
    """Typer builds every command of the command line anew for each call, in about 55 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", cache(typer.main.get_command))
        yield


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.close()


@pytest.fixture
def connect() -> Iterator[Callable[..., WireBroker]]:
    made: list[WireBroker] = []

    def make(
        *hosts: ScriptedBroker,
        operation_timeout_ms: int = 5_000,
        connection_timeout_ms: int = 10_000,
        **how: Any,
    ) -> WireBroker:
        """Connect; the timeouts are those of a quiet machine."""
        url = "pulsar://" + ",".join(one.host for one in hosts)
        how["operation_timeout_ms"] = int(deadline(operation_timeout_ms))
        how["connection_timeout_ms"] = int(deadline(connection_timeout_ms))
        made.append(WireBroker(Connection(url, **how)))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusal_timer, "REFUSED_S", 0.3)
    monkeypatch.setattr(refusal_timer, "UNAUTHENTICATED_S", 1.0)
    monkeypatch.setattr(retry, "LONGEST_WAIT_S", 0.1)
    monkeypatch.setattr(keep_alive, "PING_AFTER_S", 0.1)
    monkeypatch.setattr(keep_alive, "UNRESPONSIVE_S", deadline(1))


@pytest.fixture(params=scripted_bookie.BATCHES)
def bookie_versions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with bookies of every version."""
    monkeypatch.setattr(scripted_bookie, "batch", scripted_bookie.BATCHES[request.param])


@pytest.fixture
def impatient_bookies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bookies, "SILENT_S", deadline(2))


@pytest.fixture
def scripted() -> Iterator[AnsweringBroker]:
    broker = AnsweringBroker()
    yield broker
    broker.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count no broker as silent, however busy the machine is."""
    monkeypatch.setattr(consuming, "QUIET_S", 3_600.0)


@pytest.fixture
def brokers() -> Iterator[Callable[..., WireBroker]]:
    made: list[WireBroker] = []

    def make(
        scripted: AnsweringBroker, operation_timeout_ms: int = 10_000, **how: Any
    ) -> WireBroker:
        """Connect; the timeout is that of a quiet machine."""
        how["operation_timeout_ms"] = int(deadline(operation_timeout_ms))
        made.append(WireBroker(Connection(scripted.url, **how)))
        return made[-1]

    yield make
    for one in made:
        one.close()
