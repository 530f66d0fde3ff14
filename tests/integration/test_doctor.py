"""``keyshard doctor`` on a real broker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pulsar
import pytest

from keyshard.broker.connect import connect
from keyshard.broker.port import StartPosition
from keyshard.cli import main
from keyshard.core.position.entry import TopicPartition, full_topic_name
from keyshard.core.ring.hash_range import HashRange
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import Batching, Workload, create_partitioned_topic, produce

pytestmark = pytest.mark.broker

SUBSCRIPTION = "doctored"


class Doctor:
    """Runs the command on one topic; what it found, by what was looked at."""

    def __init__(self, broker: DevBroker, topic: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._broker, self._topic, self._capsys = broker, topic, capsys

    def run(self, *arguments: str) -> tuple[int, str]:
        command = [
            "doctor", "--topic", self._topic, "--subscription", SUBSCRIPTION,
            "--service-url", self._broker.service_url, "--admin-url", self._broker.admin_url,
            *arguments,
        ]  # fmt: skip
        with pytest.raises(SystemExit) as caught:
            main(command)
        code = caught.value.code
        return (code if isinstance(code, int) else 0), self._capsys.readouterr().out

    def found(self, *arguments: str) -> tuple[int, dict[str, tuple[str, str]]]:
        code, out = self.run("--json", *arguments)
        findings: list[dict[str, Any]] = json.loads(out)
        return code, {each["about"]: (each["level"], each["text"]) for each in findings}


@pytest.fixture
def doctor(dev_broker: DevBroker, topic_name: str, capsys: pytest.CaptureFixture[str]) -> Doctor:
    create_partitioned_topic(dev_broker.admin_url, topic_name, 2)
    return Doctor(dev_broker, topic_name, capsys)


@pytest.fixture
def client(dev_broker: DevBroker) -> Iterator[pulsar.Client]:
    made = pulsar.Client(
        dev_broker.service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
    )
    yield made
    made.close()


def publish(broker: DevBroker, topic: str, batching: Batching) -> None:
    produce(Workload(messages=400, keys=20, batching=batching), broker.service_url, topic)


@pytest.mark.parametrize(
    ("batching", "level", "says"),
    [
        ("default", "problem", "default: "),
        ("keyed", "ok", "key based: "),
        ("none", "ok", "none ("),
    ],
)
def test_it_tells_the_batching_seen_on_the_topic(  # noqa: PLR0917
    doctor: Doctor,
    dev_broker: DevBroker,
    topic_name: str,
    batching: Batching,
    level: str,
    says: str,
) -> None:
    publish(dev_broker, topic_name, batching)
    code, found = doctor.found()
    assert found["batching"][0] == level
    assert found["batching"][1].startswith(says)
    assert code == (1 if level == "problem" else 0)
    assert found["broker version"] == ("ok", f"Pulsar {dev_broker.version}.")


def test_it_tells_another_type_on_the_same_name(
    doctor: Doctor, client: pulsar.Client, topic_name: str
) -> None:
    consumer = client.subscribe(topic_name, SUBSCRIPTION, consumer_type=pulsar.ConsumerType.Shared)
    code, found = doctor.found()
    assert code == 1
    assert found["subscription"][0] == "problem"
    assert "type Shared" in found["subscription"][1]
    consumer.close()
    code, found = doctor.found()
    assert (code, found["subscription"][0]) == (0, "warning")


def test_it_tells_another_policy_on_the_same_name(
    doctor: Doctor, client: pulsar.Client, topic_name: str
) -> None:
    client.subscribe(topic_name, SUBSCRIPTION, consumer_type=pulsar.ConsumerType.KeyShared)
    code, found = doctor.found()
    assert code == 1
    assert "AUTO_SPLIT" in found["subscription"][1]


def test_it_tells_a_gap_in_the_ring(doctor: Doctor, dev_broker: DevBroker, topic_name: str) -> None:
    publish(dev_broker, topic_name, "keyed")
    broker = connect(dev_broker.connection)
    where = [TopicPartition(full_topic_name(topic_name), i) for i in range(2)]

    def own(topic_partition: TopicPartition, start: int, end: int) -> None:
        broker.subscribe(
            topic_partition,
            SUBSCRIPTION,
            HashRange(start, end),
            start=StartPosition.EARLIEST,
            consumer_name="c",
            receiver_queue_size=10,
        )

    own(where[0], 0, 65_535)
    own(where[1], 0, 999)
    own(where[1], 2_000, 65_535)
    try:
        code, found = doctor.found()
        assert code == 1
        assert found["coverage"][0] == "problem"
        assert f"slots 1000-1999 of {where[1]}" in found["coverage"][1]
        own(where[1], 1_000, 1_999)
        code, found = doctor.found()
        assert (code, found["coverage"][0], found["subscription"][0]) == (0, "ok", "ok")
    finally:
        broker.close()


def test_it_tells_orphans_and_limits_and_changes_nothing(
    doctor: Doctor, dev_broker: DevBroker, client: pulsar.Client, topic_name: str
) -> None:
    client.subscribe(
        topic_name, "forgotten", initial_position=pulsar.InitialPosition.Earliest
    ).close()
    publish(dev_broker, topic_name, "none")
    code, out = doctor.run("--rate", "50000", "--parallelism", "2")
    assert code == 0
    assert "'forgotten' (400 entries)" in out
    assert "problem" not in out
    assert "replay queue: When one range stops" in out
    assert doctor.found()[1]["subscription"][1].endswith("the first start makes it.")


def test_a_topic_that_is_not_there_is_a_problem_and_is_not_made(
    doctor: Doctor, dev_broker: DevBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = Doctor(dev_broker, "nowhere-at-all", capsys)
    for _ in range(2):
        code, found = absent.found()
        assert code == 1
        assert "does not exist" in found["broker"][1]


def test_a_broker_that_is_away_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "--topic", "t", "--subscription", "s", "--admin-url", "http://127.0.0.1:1"])
    assert caught.value.code == 1
    assert "does not answer" in capsys.readouterr().out
