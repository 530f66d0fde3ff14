"""The development broker, on the real one."""

from __future__ import annotations

import base64
import hmac
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pulsar
import pytest

from keyshard.broker.auth.credentials import Credentials
from keyshard.broker.preflight import missing_topics
from keyshard.errors import DevBrokerError
from keyshard.testing.devbroker import DevBroker, install
from tests.helpers import listening
from tests.support.deadlines import deadline
from tests.support.tested_pulsar import PULSAR

pytestmark = pytest.mark.broker

LOOPBACK = "0100007F"


@contextmanager
def client_of(broker: DevBroker) -> Iterator[pulsar.Client]:
    client = pulsar.Client(
        broker.service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
    )
    try:
        yield client
    finally:
        client.close()


def send(client: pulsar.Client, topic: str, values: range) -> None:
    producer = client.create_producer(topic)
    for value in values:
        producer.send(str(value).encode())
    producer.close()


def read(client: pulsar.Client, topic: str, count: int) -> list[int]:
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    values = [int(reader.read_next(20_000).data()) for _ in range(count)]
    assert not reader.has_message_available()
    reader.close()
    return values


def test_two_brokers_side_by_side_listen_on_loopback_only() -> None:
    settings = {"managedLedgerMaxEntriesPerLedger": "1000"}
    with DevBroker(PULSAR, settings=settings) as one, DevBroker(PULSAR) as two:
        sockets = {broker: listening(broker.pid or 0) for broker in (one, two)}
        for broker, found in sockets.items():
            assert {address for address, _ in found} == {LOOPBACK}
            assert {broker.port, broker.admin_port} < {port for _, port in found}
            maps = Path(f"/proc/{broker.pid}/maps").read_text()
            assert ".jsa" in maps.replace("classes.jsa", ""), "it reads its classes one by one"
        assert not sockets[one] & sockets[two]
        for number, broker in enumerate((one, two)):
            with client_of(broker) as client:
                send(client, "t", range(number * 10, number * 10 + 3))
                assert read(client, "t", 3) == list(range(number * 10, number * 10 + 3))
        answers = []
        for broker in (one, two):
            with httpx.Client(base_url=broker.admin_url, trust_env=False) as admin:
                configuration = admin.get("/admin/v2/brokers/configuration/runtime").json()
                answers.append(configuration["managedLedgerMaxEntriesPerLedger"])
        assert answers == ["1000", "50000"]
        folder = one.data_dir
    assert not one.is_running()
    assert not folder.exists()


def test_messages_survive_kill_and_stop(tmp_path: Path) -> None:
    with DevBroker(PULSAR, data_dir=tmp_path) as broker:
        before = (broker.service_url, broker.admin_url)
        with client_of(broker) as client:
            client.subscribe("t", "keeps", initial_position=pulsar.InitialPosition.Earliest)
            send(client, "t", range(100))
        broker.kill()
        assert not broker.is_running()
        broker.restart()
        assert (broker.service_url, broker.admin_url) == before
        with client_of(broker) as client:
            assert read(client, "t", 100) == list(range(100))
            send(client, "t", range(100, 150))
        broker.stop()
        broker.restart()
        with client_of(broker) as client:
            assert read(client, "t", 150) == list(range(150))
        with pytest.raises(DevBrokerError, match="Stop it before"):
            broker.wipe()
        broker.stop()
        broker.wipe()
        broker.start()
        with client_of(broker) as client, pytest.raises(pulsar.Timeout):
            client.create_reader("t", pulsar.MessageId.earliest).read_next(200)
    assert (tmp_path / "broker.log").exists()


def test_a_failed_start_names_its_reason(tmp_path: Path) -> None:
    broken = DevBroker(PULSAR, data_dir=tmp_path, settings={"brokerServicePort": "not-a-port"})
    with pytest.raises(DevBrokerError, match=r"its process ended.*\n.*") as caught:
        broken.start()
    assert str(tmp_path / "broker.log") in str(caught.value)
    assert not broken.is_running()
    late = DevBroker(PULSAR, data_dir=tmp_path / "late")
    with pytest.raises(DevBrokerError, match=r"not ready in time.*limit 0\.2 s"):
        late.start(timeout_s=0.2)
    assert not late.is_running()


_SECRET = base64.b64encode(bytes(range(32))).decode()
_TOKENS_OF_THE_SETTINGS = {
    "authenticationEnabled": "true",
    "authenticationProviders": (
        "org.apache.pulsar.broker.authentication.AuthenticationProviderToken"
    ),
    "tokenSecretKey": f"data:;base64,{_SECRET}",
    "authorizationEnabled": "true",
    "superUserRoles": "root",
}


def token_of(role: str) -> str:
    """A JSON Web Token of the secret above, as RFC 7519 says."""

    def part(content: bytes) -> str:
        return base64.urlsafe_b64encode(content).decode().rstrip("=")

    text = f'{part(b"""{"alg":"HS256"}""")}.{part(json.dumps({"sub": role}).encode())}'
    seal = hmac.digest(base64.b64decode(_SECRET), text.encode(), "sha256")
    return f"{text}.{part(seal)}"


@pytest.mark.parametrize(
    "settings",
    [
        {"allowAutoTopicCreation": "false", "allowAutoSubscriptionCreation": "false"},
        {"allowAutoTopicCreationType": "partitioned"},
        {"enablePersistentTopics": "false"},
        {
            **_TOKENS_OF_THE_SETTINGS,
            "brokerClientAuthenticationPlugin": (
                "org.apache.pulsar.client.impl.auth.AuthenticationToken"
            ),
            "brokerClientAuthenticationParameters": f"token:{token_of('root')}",
        },
    ],
    ids=["nothing is created", "partitioned", "not persistent", "tokens"],
)
def test_a_broker_becomes_ready_though_its_settings_forbid_a_topic(
    settings: dict[str, str],
) -> None:
    with DevBroker(PULSAR, settings=settings) as broker:
        assert missing_topics(broker.connection, Credentials(broker.connection), ()) == frozenset()


def test_a_broker_that_refuses_its_own_clients_is_named_at_once(tmp_path: Path) -> None:
    broker = DevBroker(PULSAR, data_dir=tmp_path, settings=_TOKENS_OF_THE_SETTINGS)
    with pytest.raises(DevBrokerError, match=r"(?s)refuses the credentials.*tokens=True") as caught:
        broker.start(timeout_s=deadline(120))
    assert caught.value.facts["outcome"] == "REFUSED"
    assert not broker.is_running()


Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def keyshard(tmp_path: Path) -> Command:
    environment = {**os.environ, "KEYSHARD_CACHE": str(_shared_cache(tmp_path))}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "keyshard", *arguments]
        return subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=deadline(120),
            check=False,
        )

    return run


def test_the_command_line_starts_and_stops_one(tmp_path: Path, keyshard: Command) -> None:
    plan = DevBroker(PULSAR)
    ports = ["--port", str(plan.port), "--admin-port", str(plan.admin_port)]
    data = ["--data", str(tmp_path / "data")]
    try:
        started = keyshard("broker", "start", "--version", PULSAR, *ports, *data)
        assert started.returncode == 0, started.stderr
        assert plan.service_url in started.stdout
        assert (
            "Already running"
            in keyshard("broker", "start", "--version", PULSAR, *ports, *data).stdout
        )
        other = keyshard("broker", "start", "--version", "4.0.7", *ports, *data)
        assert f"Pulsar {PULSAR} runs on" in other.stderr
        assert keyshard("broker", "status", *data).returncode == 0
        urls = ["--service-url", plan.service_url, "--admin-url", plan.admin_url]
        load = ["--partitions", "3", "--messages", "500", "--keys", "20"]
        produced = keyshard("produce", "t", *load, *urls)
        assert "Published 500 messages with 20 keys to t" in produced.stdout, produced.stderr
        clash = keyshard("produce", "t", "--partitions", "4", *urls)
        assert (clash.returncode, clash.stdout) == (1, "")
        assert clash.stderr.startswith("[KEYSHARD_ADMIN] ")
        taken = keyshard(
            "broker", "start", "--version", PULSAR, *ports, "--data", str(tmp_path / "other")
        )
        assert taken.returncode == 1
        assert f"Port {plan.port} is in use" in taken.stderr
        assert "INFO" in keyshard("broker", "logs", "-n", "5", *data).stdout
    finally:
        stopped = keyshard("broker", "stop", *data)
    assert "Stopped the broker" in stopped.stdout
    assert keyshard("broker", "status", *data).returncode == 1


def test_the_command_line_starts_one_with_tls_and_tokens(tmp_path: Path, keyshard: Command) -> None:
    plan = DevBroker(PULSAR, tls=True)
    ports = ["--port", str(plan.port), "--admin-port", str(plan.admin_port)]
    data = ["--data", str(tmp_path / "data")]
    conf = tmp_path / "data" / "client.conf"
    try:
        started = keyshard(
            "broker", "start", "--version", PULSAR, "--tls", "--tokens", *ports, *data
        )
        assert started.returncode == 0, started.stderr
        for output in (plan.service_url, plan.admin_url, str(conf)):
            assert output in started.stdout
        running = keyshard("broker", "status", *data).stdout
        assert running.partition("Pulsar")[2] == started.stdout.partition("Pulsar")[2]
        assert conf.stat().st_mode & 0o777 == 0o600
        load = ["produce", "t", "--partitions", "3", "--messages", "500", "--keys", "20"]
        produced = keyshard(*load, "--client-conf", str(conf))
        assert "Published 500 messages" in produced.stdout, produced.stderr
        ca = str(tmp_path / "data" / "security" / "ca.pem")
        urls = ["--service-url", plan.service_url, "--admin-url", plan.admin_url]
        stranger = keyshard(*load, *urls, "--tls-trust-certs", ca)
        assert stranger.stderr.startswith("[KEYSHARD_AUTHENTICATION] ")
    finally:
        keyshard("broker", "stop", *data)


def _shared_cache(tmp_path: Path) -> Path:
    """A cache of this test with the distribution of the user's, so nothing is fetched again."""
    cache = tmp_path / "cache"
    (cache / "pulsar").mkdir(parents=True)
    home = install(PULSAR)
    for one in home, *home.parent.glob("*.jsa"):
        (cache / "pulsar" / one.name).symlink_to(one)
    return cache
