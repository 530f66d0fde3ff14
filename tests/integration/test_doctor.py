"""``keyshard doctor`` on a real broker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pulsar
import pytest

from keyshard.broker.connect import connect, connect_admin
from keyshard.broker.port import StartPosition, SubscriptionSpec
from keyshard.cli import main
from keyshard.core.diagnosis import judge_faults
from keyshard.core.position.entry import TopicPartition, full_topic_name
from keyshard.core.ring.hash_range import HashRange
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import Batching, Workload, create_partitioned_topic, produce
from tests.contract.pulsar_harness import PulsarHarness
from tests.stored_entries import of_kafka
from tests.support.scalable_topic import ScalableTopic
from tests.support.stored_topic import admin_of
from tests.support.tested_pulsar import PULSAR

pytestmark = pytest.mark.broker

SUBSCRIPTION = "doctored"


class Doctor:
    """Runs the command on one topic; returns the findings by subject."""

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


@pytest.mark.parametrize("policy", ["none", "topic", "namespace"])
def test_it_checks_the_topic_of_a_sink(
    dev_broker: DevBroker, topic_name: str, capsys: pytest.CaptureFixture[str], policy: str
) -> None:
    namespace = f"public/doctor-{topic_name}"
    with admin_of(dev_broker) as admin:
        admin.put(f"/namespaces/{namespace}").raise_for_status()
        admin.put(f"/persistent/{namespace}/t/partitions", json=2).raise_for_status()
        if policy == "namespace":
            path = f"/namespaces/{namespace}/deduplication"
            admin.post(path, json=True).raise_for_status()
        if policy == "topic":
            path = f"/persistent/{namespace}/t/deduplicationEnabled"
            admin.post(path, json=True).raise_for_status()

    def found(topic: str) -> tuple[int, dict[str, tuple[str, str]]]:
        command = [
            "doctor", "--json", "--sink", topic,
            "--service-url", dev_broker.service_url, "--admin-url", dev_broker.admin_url,
        ]  # fmt: skip
        with pytest.raises(SystemExit) as caught:
            main(command)
        findings = json.loads(capsys.readouterr().out)
        levels = {each["about"]: (each["level"], each["text"]) for each in findings}
        return int(caught.value.code or 0), levels

    code, levels = found(f"{namespace}/t")
    assert levels["topic"] == ("ok", f"persistent://{namespace}/t has 2 topic partition(s).")
    assert levels["permission"][0] == "ok"
    wanted = {"none": "problem", "topic": "warning", "namespace": "ok"}[policy]
    assert levels["deduplication"][0] == wanted
    assert code == (policy == "none")
    if policy == "none":
        code, levels = found(f"{namespace}/away")
        assert (code, levels["broker"][0]) == (1, "problem")
        assert "away does not exist" in levels["broker"][1]


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
        ("keyed", "ok", "by key: "),
        ("none", "ok", "none ("),
    ],
)
def test_the_batching_of_the_topic_is_reported(  # noqa: PLR0917
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
    assert found["broker version"][0] == "ok"
    assert found["broker version"][1].startswith(f"Pulsar {dev_broker.version}. ")
    known = [finding.text for finding in judge_faults(dev_broker.version)]
    assert found["known fault"][1] in known


def test_another_type_of_the_subscription_is_reported(
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


def test_another_policy_of_the_subscription_is_reported(
    doctor: Doctor, client: pulsar.Client, topic_name: str
) -> None:
    client.subscribe(topic_name, SUBSCRIPTION, consumer_type=pulsar.ConsumerType.KeyShared)
    code, found = doctor.found()
    assert code == 1
    assert "AUTO_SPLIT" in found["subscription"][1]


def test_a_gap_in_the_ring_is_reported(
    doctor: Doctor, dev_broker: DevBroker, topic_name: str
) -> None:
    publish(dev_broker, topic_name, "keyed")
    broker = connect(dev_broker.connection)
    where = [TopicPartition(full_topic_name(topic_name), i) for i in range(2)]

    def own(topic_partition: TopicPartition, start: int, end: int) -> None:
        broker.subscribe(
            SubscriptionSpec(
                topic_partition,
                SUBSCRIPTION,
                HashRange(start, end),
                consumer_name="c",
                receiver_queue_size=10,
            ),
            StartPosition.EARLIEST,
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


def test_orphans_and_limits_are_reported_without_any_change(
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
    assert "replay queue: If one range stops" in out
    assert doctor.found()[1]["subscription"][1].endswith("The first start creates it.")


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


def test_a_terminated_partition_is_named_for_a_source_and_for_a_sink(
    doctor: Doctor, dev_broker: DevBroker, topic_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(dev_broker, topic_name, "keyed")
    assert "termination" not in doctor.found()[1]
    name = f"persistent://public/default/{topic_name}-partition-1"
    path = name.replace("://", "/")
    for step in ("terminate", "unload"):
        with admin_of(dev_broker) as admin:
            method = admin.post if step == "terminate" else admin.put
            method(f"/{path}/{step}").raise_for_status()
        code, found = doctor.found()
        assert (code, found["termination"][0]) == (0, "warning"), step
        assert f"1 of 2 topic partition(s) are terminated: {name}." in found["termination"][1]
        command = [
            "doctor", "--json", "--sink", topic_name,
            "--service-url", dev_broker.service_url, "--admin-url", dev_broker.admin_url,
        ]  # fmt: skip
        with pytest.raises(SystemExit) as caught:
            main(command)
        of_sink = {each["about"]: each for each in json.loads(capsys.readouterr().out)}
        assert (caught.value.code, of_sink["termination"]["level"]) == (1, "problem")
        assert "A sink cannot write there." in of_sink["termination"]["text"]


@pytest.mark.parametrize("transport", ["wire", "client"])
def test_entries_in_the_format_of_kafka_are_named_and_not_read_by_pulsar_client(
    doctor: Doctor, dev_broker: DevBroker, topic_name: str, transport: str
) -> None:
    harness = PulsarHarness(dev_broker.service_url, dev_broker.admin_url)
    where = f"{full_topic_name(topic_name)}-partition-0"
    harness.publish_raw(where, [({6: b"k"}, b"good"), of_kafka(1), of_kafka(5)])
    harness.close()
    code, out = doctor.run("--json", "--transport", transport)
    (found,) = [one for one in json.loads(out) if one["about"] == "unreadable"]
    assert (code, found["level"]) == (1, "problem")
    assert found["text"].startswith("2 of the newest entries cannot be read.")
    assert "has the format of Kafka" in found["text"]
    assert ("pulsar-client checks no entry" in found["advice"]) == (transport == "client")


@pytest.mark.skipif(int(PULSAR.split(".")[0]) < 5, reason="needs scalable topics")
def test_it_finds_a_subscription_that_is_not_registered_with_a_scalable_topic(
    dev_broker: DevBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        closing(ScalableTopic(dev_broker)) as topic,
        closing(connect(dev_broker.connection)) as broker,
        closing(connect_admin(dev_broker.connection)) as admin,
    ):
        doctor = Doctor(dev_broker, topic.name, capsys)
        where = broker.watch_segments(topic.name, lambda: None).graph.partition(0)
        spec = SubscriptionSpec(where, SUBSCRIPTION, HashRange(0, 65_535), "c", 10)
        broker.subscribe(spec, StartPosition.EARLIEST).close()
        topic.split(0)
        code, findings = doctor.found()
        assert code == 1
        assert findings["segments"] == ("ok", f"{topic.name} has 3 segment(s), 1 of them sealed.")
        level, text = findings["registration"]
        assert level == "problem"
        assert f"{SUBSCRIPTION!r} is not registered with {topic.name}" in text
        admin.register(topic.name, SUBSCRIPTION)
        code, findings = doctor.found()
        assert (code, findings["registration"][0]) == (0, "ok")
        code, findings = doctor.found("--rate", "10")
        assert (code, findings["limits"][0]) == (0, "ok")
