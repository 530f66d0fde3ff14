"""Worker backends: the option ``workers``, and backends that other packages add."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from keyshard import HandlerConfig, KeyShardSource
from keyshard.broker.memory import MemoryBroker, MemoryCluster, Message
from keyshard.broker.port import StartPosition, SubscriptionSpec
from keyshard.config.connection import Connection
from keyshard.config.workers import WORKERS_MAX, WorkersOption
from keyshard.core.position.entry import TopicPartition
from keyshard.core.ring.hash_range import split_ring
from keyshard.errors import ConfigError
from keyshard.workers.backends import StartWorker
from keyshard.workers.backends import connect_source as connect
from tests.helpers import wait_until
from tests.support.worker_servers import LocalWorker

Install = Callable[..., None]


def place(connection: Connection, workers: WorkersOption) -> StartWorker:
    """Workers in this process, as an entry point of another package would provide them."""
    if set(workers.options) - {"share"}:
        raise ConfigError(f"workers is {workers.text!r}; the only option is 'share'.")
    cluster = MemoryCluster.named(connection.service_url.removeprefix("memory://"))
    return lambda _stop: LocalWorker(MemoryBroker(cluster))


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a package that has nothing but entry points."""

    def make(**names: str) -> None:
        folder = tmp_path / "elsewhere-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
        lines = "\n".join(f"{name} = {value}" for name, value in names.items())
        (folder / "entry_points.txt").write_text(f"[keyshard.workers]\n{lines}\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setitem(sys.modules, "elsewhere", sys.modules[__name__])

    return make


@pytest.mark.parametrize(
    "text",
    [
        "processes", "processes:", "processes:x", "processes:-1", "processes:1.5", ":4", "4",
        "processes:4 ", "PROCESSES:4", "embedded:1", "processes:٤", "processes:4?", "processes:4#",
        "a" * 5_000 + ":4",
    ],
)  # fmt: skip
def test_an_unknown_worker_backend_is_refused_with_the_valid_forms(text: str) -> None:
    with pytest.raises(ConfigError, match=r"(?s)workers is .*'embedded'.*'processes:4'"):
        KeyShardSource("t", workers=text)


@pytest.mark.parametrize("count", ["0", str(WORKERS_MAX + 1), "999999999"])
def test_a_number_of_workers_has_bounds(count: str) -> None:
    with pytest.raises(ConfigError, match=f"workers is {count}; .* 1 to {WORKERS_MAX}"):
        KeyShardSource("t", workers=f"processes:{count}")


def test_workers_of_a_source_and_of_its_handlers_are_reported_apart() -> None:
    with pytest.raises(ConfigError, match=r"(?s)workers is 4.\nRemedy: Write 'embedded'.* of run"):
        KeyShardSource("t", workers=4)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"(?s)workers is 'ray:4'; .*handlers.* of KeyShardSource"
    ):
        HandlerConfig(workers="ray:4")  # type: ignore[arg-type]


def test_an_unknown_backend_is_refused_with_the_installed_ones(install: Install) -> None:
    install(elsewhere="elsewhere:place", broken="nowhere_at_all:place")
    with pytest.raises(ConfigError, match=r"(?s)'kubernetes:2'.*'broken:4'.*'elsewhere:4'"):
        KeyShardSource("t", workers="kubernetes:2")
    assert KeyShardSource("t", workers="elsewhere:2").workers == "elsewhere:2"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("processes:2?share=1", "takes no options"),
        ("elsewhere:2?share=1&share=2", "has an option twice"),
        ("elsewhere:2?share", "name=value&name=value"),
        ("elsewhere:2?a=1&&b=2", "name=value&name=value"),
    ],
)
def test_malformed_options_of_a_backend_are_refused(install: Install, text: str, why: str) -> None:
    install(elsewhere="elsewhere:place")
    with pytest.raises(ConfigError, match=why):
        KeyShardSource("t", workers=text)


def test_a_backend_that_cannot_be_loaded_is_named_with_its_error(install: Install) -> None:
    install(broken="nowhere_at_all:place", empty="elsewhere:no_such_thing")
    for name, why in (("broken", "nowhere_at_all"), ("empty", "no_such_thing")):
        with pytest.raises(ConfigError, match=f"workers is '{name}:1'.*cannot be loaded.*{why}"):
            connect(Connection("memory://places"), WorkersOption.parse(f"{name}:1"))


def test_workers_run_in_the_backend_of_an_installed_package(install: Install) -> None:
    install(elsewhere="elsewhere:place")
    connection = Connection("memory://places")
    with pytest.raises(ConfigError, match="the only option is 'share'"):
        connect(connection, WorkersOption.parse("elsewhere:2?cpus=1"))
    cluster = MemoryCluster.named("places")
    topic = cluster.create_topic("orders")
    broker = connect(connection, WorkersOption.parse("elsewhere:2?share=a%26b"))
    try:
        consumers = [
            broker.subscribe(
                SubscriptionSpec(
                    TopicPartition(topic), "s", part, consumer_name="c", receiver_queue_size=10
                ),
                StartPosition.EARLIEST,
            )
            for part in split_ring(2)
        ]
        cluster.publish(topic, *(Message(b"%d" % i, key=f"k{i}") for i in range(20)))
        seen = 0

        def all_came() -> bool:
            nonlocal seen
            seen += sum(block.rows for one in consumers for block in one.receive(10))
            return seen == 20

        wait_until(all_came)
    finally:
        broker.close()
