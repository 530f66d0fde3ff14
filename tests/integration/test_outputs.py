"""Handlers that publish, on a real broker: each output once, whenever the process is killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from keyshard import Connection, KeyShardSink, KeyShardSource, Message, Produce
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.errors import DeduplicationError
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.checkers import check
from keyshard.testing.verify.history import Event
from keyshard.testing.verify.recorder import sent_events
from keyshard.testing.verify.workloads import (
    Workload,
    create_partitioned_topic,
    parse_value,
    produce,
)
from tests.helpers import wait_until
from tests.integration.test_sink import admin, namespace, stored, topic
from tests.support.deadlines import deadline
from tests.support.memory_topic import Run

__all__ = ["admin", "namespace", "topic"]  # fixtures
pytestmark = pytest.mark.broker
ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("KEYSHARD_TEST_KILLS", "4"))
"""Kills of the service; each comes at a random moment of a checkpoint and its outputs."""
MESSAGES = int(os.environ.get("KEYSHARD_TEST_MESSAGES", "2000"))
SEED = int(os.environ.get("KEYSHARD_TEST_SEED", "1"))


def copy(message: Message) -> Produce:
    return Produce(message.value, key=message.key)


def by_key(found: list[Message]) -> dict[str | None, list[int]]:
    numbers: dict[str | None, list[int]] = {}
    for one in found:
        numbers.setdefault(one.key, []).append(parse_value(one.value or b"")[1])
    return numbers


def test_every_message_is_copied_in_order_before_it_is_acknowledged(
    dev_broker: DevBroker, topic_name: str, topic: str
) -> None:
    create_partitioned_topic(dev_broker.admin_url, topic_name, 3)
    sent = produce(Workload(3_000, keys=50), dev_broker.service_url, topic_name)
    source = KeyShardSource(
        topic_name, subscription="copies", parallelism=4, starting_position="earliest",
        service_url=dev_broker.service_url, admin_url=dev_broker.admin_url,
    )  # fmt: skip
    sink = KeyShardSink(topic, service_url=dev_broker.service_url)
    with Run(source, copy, {"sink": sink}) as run:
        run.wait_started()
        assert run.error is None
        wait_until(
            lambda: run.source.status()["counters"]["outputsConfirmed"] == 3_000, deadline(60)
        )
    assert run.error is None
    found = by_key(stored(dev_broker, topic))
    assert found == {key: list(range(count)) for key, count in sent.per_key.items()}


def judge(topic: str, sent: Mapping[str, int], found: list[Message]) -> None:
    """Let the checkers judge what is stored: each output once, in the order of its key."""
    events = list(sent_events(topic, sent, 0.0))
    for t, one in enumerate(found, 1):
        key, seq = parse_value(one.value or b"")
        for kind in ("started", "completed"):
            ledger, entry, index = one.message_id
            events.append(
                Event(
                    t, kind, topic=topic, partition=one.partition, ledger=ledger, entry=entry,
                    index=index, key=key, seq=seq, worker="service",
                )
            )  # fmt: skip
    verdicts = {verdict.name: verdict for verdict in check(events)}
    for name in ("no loss", "order per key", "bounded duplicates"):
        assert verdicts[name].checked
        assert verdicts[name].holds, verdicts[name]


class Service:
    """The example of a service that publishes, in a process."""

    def __init__(self, broker: DevBroker, orders: str, invoices: str, folder: Path) -> None:
        self.checkpoint = folder / "billing.json"
        self.errors = folder / "stderr.txt"
        self._command = [
            sys.executable, "-m", "examples.publishing_service", orders, invoices,
            "--checks", f"{invoices}-checks", "--checkpoint", str(self.checkpoint),
            "--service-url", broker.service_url, "--admin-url", broker.admin_url,
        ]  # fmt: skip

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        with self.errors.open("ab") as errors:
            process = subprocess.Popen(self._command, cwd=ROOT, stderr=errors)
        try:
            yield process
        finally:
            process.kill()
            process.wait(deadline(30))

    def stored(self) -> Checkpoint | None:
        return Checkpoint.from_json(self.checkpoint.read_text()) if self._written() else None

    def _written(self) -> int:
        return self.checkpoint.stat().st_mtime_ns if self.checkpoint.exists() else 0

    def wait_for_checkpoint(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until the process has stored a checkpoint."""
        before = self._written()
        wait_until(lambda: self._written() != before or process.poll() is not None, deadline(60))
        assert process.poll() is None, self.errors.read_text()


def test_a_service_that_is_killed_at_random_moments_publishes_each_output_once(
    dev_broker: DevBroker, topic_name: str, topic: str, admin: httpx.Client, tmp_path: Path
) -> None:
    create_partitioned_topic(dev_broker.admin_url, topic_name, 3)
    checks = f"{topic}-checks"
    admin.put(f"/{checks.replace('://', '/')}/partitions", json=2).raise_for_status()
    service = Service(dev_broker, topic_name, topic, tmp_path)
    draw, sent = random.Random(SEED), Counter[str]()
    pending = 0
    for _ in range(KILLS):
        with KeyShardSink(topic_name, service_url=dev_broker.service_url) as orders:
            for _ in range(MESSAGES // KILLS):
                key = f"k{draw.randrange(40)}"
                orders.send(f"{key}:{sent[key]}:".encode(), key=key)
                sent[key] += 1
        with service.running() as process:
            service.wait_for_checkpoint(process)
            time.sleep(draw.choice([0.0, draw.uniform(0, 0.02), draw.uniform(0, 0.2)]))
        stored_now = service.stored()
        assert stored_now is not None
        assert stored_now.outputs is not None
        pending += bool(stored_now.outputs.topics)
    assert pending, "no kill came between a checkpoint and the next"
    with service.running() as process:
        wait_until(lambda: len(stored(dev_broker, topic)) >= sum(sent.values()), deadline(60))
        process.send_signal(signal.SIGTERM)
        assert process.wait(deadline(60)) == 0, service.errors.read_text()
    invoices = stored(dev_broker, topic)
    judge(topic, sent, invoices)
    assert len(invoices) == sum(sent.values())
    checked = [one.value for one in invoices if zlib.crc32(one.value or b"") % 10 == 0]
    assert Counter(one.value for one in stored(dev_broker, checks)) == Counter(checked)


@pytest.mark.parametrize("asked", [True, False])
def test_a_topic_that_is_not_deduplicated_ends_the_run_by_name(
    dev_broker: DevBroker, topic_name: str, admin: httpx.Client, tmp_path: Path, asked: bool
) -> None:
    namespace = f"public/{topic_name}"
    admin.put(f"/namespaces/{namespace}").raise_for_status()
    admin.post(f"/namespaces/{namespace}/deduplication", json=False).raise_for_status()
    admin.put(f"/persistent/{namespace}/out").raise_for_status()
    create_partitioned_topic(dev_broker.admin_url, topic_name, 1)
    produce(Workload(10, keys=2), dev_broker.service_url, topic_name)
    source = KeyShardSource(
        topic_name, subscription="copies", parallelism=1, starting_position="earliest",
        service_url=dev_broker.service_url,
    )  # fmt: skip
    admin_url = dev_broker.admin_url if asked else None
    sink = KeyShardSink(
        f"{namespace}/out", sink_id="copies",
        connection=Connection(dev_broker.service_url, admin_url=admin_url),
    )  # fmt: skip
    with pytest.raises(DeduplicationError, match=f"set-deduplication {namespace} --enable"):
        source.run(copy, sink=sink, checkpoint=tmp_path / "copies.json")
    first_entry = {one.key for one in stored(dev_broker, f"persistent://{namespace}/out")}
    assert len(first_entry) == (not asked)
