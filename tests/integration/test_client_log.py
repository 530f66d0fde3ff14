"""The C++ client while its broker is killed: few lines, all of them keyshard's, no console."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from contextlib import closing
from pathlib import Path

import pytest

from keyshard.broker.admin.rest import PulsarAdmin
from keyshard.core.position.entry import TopicPartition
from keyshard.errors import BrokerError
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import create_partitioned_topic
from tests.helpers import wait_until
from tests.support.deadlines import deadline
from tests.support.tested_pulsar import PULSAR

TOPIC = "persistent://public/default/orders"
PARTITIONS, RANGES = 5, 8
LINES_MAX = 12
"""Kinds of lines that the client has for a connection that is gone."""

PROGRAM = """
    import logging, sys, threading
    logging.basicConfig(filename=sys.argv[3], format="%(levelname)s %(name)s %(message)s")
    from keyshard import KeyShardSource
    source = KeyShardSource(
        "orders", service_url=sys.argv[1], subscription="log", parallelism=int(sys.argv[2]),
        transport="client",
    )
    thread = threading.Thread(target=source.run, args=(lambda _: None,))
    thread.start()
    sys.stdin.readline()
    source.stop()
    thread.join()
"""


@pytest.mark.broker
def test_a_killed_broker_makes_few_log_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()

    def result() -> list[str]:
        return [line for line in log.read_text().splitlines() if " keyshard.client " in line]

    with DevBroker(PULSAR, data_dir=tmp_path / "data") as broker:
        create_partitioned_topic(broker.admin_url, TOPIC, PARTITIONS)
        program = subprocess.Popen(
            [
                sys.executable, "-c", textwrap.dedent(PROGRAM),
                broker.service_url, str(RANGES), str(log),
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            wait_until(lambda: subscribed(broker), deadline_s=deadline(60))
            assert result() == [], "a client that works says nothing"
            broker.kill()
            wait_until(lambda: any("refused" in line for line in result()), deadline_s=deadline(60))
            broker.start()
            wait_until(lambda: subscribed(broker), deadline_s=deadline(60))
        finally:
            output, _ = program.communicate("stop\n", timeout=deadline(60))
    assert output == ""
    lines = result()
    assert all(line.startswith("WARNING keyshard.client ") for line in lines)
    assert 1 <= len(lines) <= LINES_MAX, "\n".join(lines)


def subscribed(broker: DevBroker) -> bool:
    """Whether every consumer is there."""
    with closing(PulsarAdmin(broker.connection)) as admin:
        try:
            stats = [admin.subscription(TopicPartition(TOPIC, n), "log") for n in range(PARTITIONS)]
        except BrokerError:
            return False
    return all(one is not None and len(one["consumers"]) == RANGES for one in stats)
