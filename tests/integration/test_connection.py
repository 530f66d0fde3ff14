"""Sources at a broker with TLS, tokens and permissions: admitted and refused roles."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pulsar
import pytest
from pulsar.schema import AvroSchema, Long, Record

from keyshard import (
    Connection,
    KeyShardSink,
    KeyShardSource,
    Message,
    OAuth2,
    Reject,
    SourceStream,
    Token,
)
from keyshard.broker.admin.http import AdminHttp
from keyshard.broker.admin.rest import PulsarAdmin
from keyshard.cli import main
from keyshard.core.position.entry import TopicPartition
from keyshard.errors import (
    AuthenticationError,
    AuthorizationError,
    BrokerError,
    BrokerUnavailableError,
    KeyShardError,
    TlsError,
)
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.devbroker.security import Authority
from keyshard.testing.verify.workloads import Workload, create_partitioned_topic, produce
from tests.helpers import wait_until
from tests.support.deadlines import deadline, in_time, joined
from tests.support.error_text import has_error_form
from tests.support.tested_pulsar import PULSAR

pytestmark = pytest.mark.broker

ROLE = "billing-app"
KEEPER = "keeper-app"
"""Role that also keeps dead letters."""
SECRET = "s3cr3t-of-nobody"
SOON_S = deadline(7)
"""Longest time until a mistake is reported, seconds."""
HOUR_MS = 3_600_000
"""Time-outs of a start that a test cannot wait for."""
SINK_WAITS_MS = 2_000
"""Time for which a sink waits for a broker that may come back, milliseconds."""


@pytest.fixture(scope="module")
def broker() -> Iterator[DevBroker]:
    with DevBroker(PULSAR, tls=True, tokens=True) as broker:
        yield broker


@pytest.fixture
def topic(broker: DevBroker, topic_name: str) -> str:
    """A topic with messages that the role may consume."""
    create_partitioned_topic(broker.connection, topic_name, 2)
    grant(broker, topic_name, "consume")
    produce(Workload(100, 10), broker.connection, topic_name)
    return topic_name


def grant(broker: DevBroker, topic: str, *actions: str, role: str = ROLE) -> None:
    with closing(AdminHttp(broker.connection)) as admin:
        path = f"/admin/v2/persistent/public/default/{topic}/permissions/{role}"
        assert admin.request("POST", path, json=list(actions)).is_success


def as_role(broker: DevBroker, expires_in_s: float | None = None) -> Connection:
    token = Token(broker.signer.token(ROLE, expires_in_s))
    return replace(broker.connection, authentication=token)


def source_at(connection: Connection, topic: str, **options: Any) -> KeyShardSource:
    return KeyShardSource(
        topic, subscription="billing", connection=connection, parallelism=4,
        starting_position="earliest", **options,
    )  # fmt: skip


def rows_of(connection: Connection, topic: str, wanted: int = 100) -> int:
    """Rows that a source gets and acknowledges."""
    with source_at(connection, topic).open() as stream:
        return take(stream, wanted)


def take(stream: SourceStream, wanted: int) -> int:
    rows = 0
    while rows < wanted and (batch := stream.next_batch(timeout_s=deadline(30))):
        rows += sum(part.num_rows for part in batch)
        stream.commit(batch)
    return rows


def refused(
    broker: DevBroker, connection: Connection, topic: str, kind: type[BrokerError], *output: str
) -> str:
    """A source is refused soon by one sentence, through either way in, and takes nothing.

    A sink is refused for the same reason.
    """
    text = ""
    patient = replace(connection, operation_timeout_ms=HOUR_MS)
    for way in (patient, replace(patient, admin_url=None)):
        began = time.monotonic()
        with pytest.raises(BrokerError) as caught:
            source_at(way, topic, subscribe_timeout_ms=HOUR_MS).open()
        in_time(began + SOON_S, "the refusal took longer")
        text = str(caught.value)
        assert type(caught.value) is kind, text
        assert text.startswith(f"[{kind.code}] ")
        assert has_error_form(text), text
        assert all(part in text for part in output), text
        if isinstance(way.authentication, Token) and way.authentication.value is not None:
            assert way.authentication.value.reveal() not in text  # type: ignore[union-attr]
    with (
        KeyShardSink(
            topic, connection=replace(connection, operation_timeout_ms=SINK_WAITS_MS)
        ) as sink,
        pytest.raises(BrokerError) as caught,
    ):
        sink.send(b"")
    text = str(caught.value)
    assert type(caught.value) is kind, text
    assert all(part in text for part in output), text
    with closing(PulsarAdmin(broker.connection)) as admin:
        assert consumers(admin, topic) == 0
        for partition in range(2):
            where = TopicPartition(f"{FULL}{topic}", partition)
            assert admin.subscription(where, "billing") is None
    return text


FULL = "persistent://public/default/"


def test_the_right_token_gets_everything(broker: DevBroker, topic: str) -> None:
    assert rows_of(as_role(broker), topic) == 100


class Order(Record):  # type: ignore[misc]
    id = Long()


@pytest.mark.parametrize("admin", [True, False])
def test_the_permission_to_consume_is_enough_for_values_with_a_schema(
    admin: bool, broker: DevBroker, topic_name: str
) -> None:
    token = pulsar.AuthenticationToken(broker.signer.token("admin"))
    client = pulsar.Client(
        broker.service_url, authentication=token,
        tls_trust_certs_file_path=str(broker.authority.path),
        logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error),
    )  # fmt: skip
    with closing(client):
        producer = client.create_producer(topic_name, schema=AvroSchema(Order))
        for number in range(3):
            producer.send(Order(id=number), partition_key="k")
    grant(broker, topic_name, "consume")
    connection = as_role(broker)
    source = source_at(connection if admin else replace(connection, admin_url=None), topic_name)
    rows: list[dict[str, int]] = []
    with source.open() as stream:
        decoder = source.decoder(["id"])
        while len(rows) < 3 and (batch := stream.next_batch(timeout_s=deadline(30))):
            rows += [row for one in decoder.decoded(batch) for row in one.to_pylist()]
    assert rows == [{"id": number} for number in range(3)]


def test_a_token_is_read_from_a_file_or_a_variable(
    broker: DevBroker, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text(broker.signer.token(ROLE) + "\n")
    assert rows_of(replace(as_role(broker), authentication=Token(file=file)), topic) == 100
    produce(Workload(50, 10), broker.connection, topic)
    monkeypatch.setenv("KEYSHARD_TEST_TOKEN", broker.signer.token(ROLE))
    token = Token(environment="KEYSHARD_TEST_TOKEN")
    assert rows_of(replace(as_role(broker), authentication=token), topic, 50) == 50


def test_a_wrong_token_is_refused(broker: DevBroker, topic: str) -> None:
    wrong = Token(f"{broker.signer.token(ROLE)[:-6]}AAAAAA")
    connection = replace(broker.connection, authentication=wrong)
    refused(broker, connection, topic, AuthenticationError, ROLE, "rejects")


def test_an_expired_token_is_refused(broker: DevBroker, topic: str) -> None:
    refused(broker, as_role(broker, -60), topic, AuthenticationError, ROLE, "expired at")


def test_a_connection_without_a_token_is_refused(broker: DevBroker, topic: str) -> None:
    connection = replace(broker.connection, authentication=None)
    refused(broker, connection, topic, AuthenticationError, "without authentication")


def test_a_role_without_the_permission_is_refused(broker: DevBroker, topic_name: str) -> None:
    create_partitioned_topic(broker.connection, topic_name, 2)
    refused(
        broker, as_role(broker), topic_name, AuthorizationError, f"Role {ROLE!r} lacks",
        f"{FULL}{topic_name}", "permission 'consume",
    )  # fmt: skip


def test_a_host_that_the_certificate_does_not_name_is_refused(
    broker: DevBroker, topic: str
) -> None:
    connection = as_role(broker)
    other = replace(
        connection,
        service_url=connection.service_url.replace("127.0.0.1", "127.1"),
        admin_url=(connection.admin_url or "").replace("127.0.0.1", "127.1"),
    )
    refused(broker, other, topic, TlsError, "another host", "tls_hostname_verification")
    assert rows_of(replace(other, tls_hostname_verification=False), topic) == 100


def test_a_certificate_of_an_unknown_authority_is_refused(broker: DevBroker, topic: str) -> None:
    connection = replace(as_role(broker), tls_trust_certs_file_path=None)
    refused(broker, connection, topic, TlsError, "not trusted", "tls_trust_certs_file_path")


def test_urls_without_tls_are_refused_at_ports_with_tls(broker: DevBroker, topic: str) -> None:
    plain = Connection(
        broker.service_url.replace("+ssl", ""), authentication=as_role(broker).authentication
    )
    refused(broker, plain, topic, BrokerUnavailableError, "pulsar+ssl://")
    admin = replace(as_role(broker), admin_url=broker.admin_url.replace("https", "http"))
    with pytest.raises(BrokerUnavailableError, match="https://"):
        source_at(admin, topic).open()


def test_a_client_certificate_identifies_the_source(broker: DevBroker, topic: str) -> None:
    certificate, key = broker.authority.certificate(ROLE)
    connection = replace(
        broker.connection, authentication=None,
        tls_certificate_file_path=certificate, tls_key_file_path=key,
    )  # fmt: skip
    assert rows_of(connection, topic) == 100
    certificate, key = broker.authority.certificate("somebody-else")
    other = replace(connection, tls_certificate_file_path=certificate, tls_key_file_path=key)
    with pytest.raises(AuthorizationError, match=r"somebody-else.*lacks the permission"):
        source_at(other, topic).open()


def test_a_client_certificate_of_an_unknown_authority_is_refused(
    broker: DevBroker, topic: str, tmp_path: Path
) -> None:
    certificate, key = Authority(tmp_path).certificate(ROLE)
    connection = replace(
        broker.connection, authentication=None, admin_url=None,
        tls_certificate_file_path=certificate, tls_key_file_path=key,
    )  # fmt: skip
    refused(broker, connection, topic, TlsError, "rejects", str(certificate))


def test_a_token_that_is_renewed_in_its_file_keeps_a_source_going(
    broker: DevBroker, topic: str, tmp_path: Path
) -> None:
    """1. A token expires in seconds. 2. It is renewed in its file. 3. The broker asks again."""
    file = tmp_path / "token"
    renew(broker, file, 6, KEEPER)
    expires = time.monotonic() + 6
    with closing(AdminHttp(broker.connection)) as admin:  # for the dead-letter topic, too
        path = f"/admin/v2/namespaces/public/default/permissions/{KEEPER}"
        assert admin.request("POST", path, json=["consume", "produce"]).is_success
    source = source_at(replace(as_role(broker), authentication=Token(file=file)), topic)
    seen: list[Message] = []
    errors: list[KeyShardError] = []

    def run() -> None:
        try:
            source.run(seen.append, lanes=2)
        except KeyShardError as exc:
            errors.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_until(lambda: len(seen) == 100 or errors, deadline_s=deadline(30))
        wait_until(lambda: time.monotonic() > expires - 2, deadline_s=deadline(10))
        renew(broker, file, 3600, KEEPER)
        wait_until(lambda: time.monotonic() > expires + 4, deadline_s=deadline(15))
        produce(Workload(100, 10), broker.connection, topic)
        wait_until(lambda: len(seen) == 200 or errors, deadline_s=deadline(30))
        assert errors == []
    finally:
        source.stop() if thread.is_alive() else None
        joined(thread, deadline(30))
    assert len(seen) == 200


def renew(broker: DevBroker, file: Path, expires_in_s: float, role: str) -> None:
    fresh = file.with_suffix(".new")
    fresh.write_text(broker.signer.token(role, expires_in_s))
    fresh.replace(file)


def test_a_token_that_is_renewed_late_is_waited_for(
    broker: DevBroker, topic: str, tmp_path: Path
) -> None:
    """1. A token expires, and connections end. 2. Only then it is renewed. 3. The rest comes."""
    file = tmp_path / "token"
    renew(broker, file, 8, ROLE)
    connection = replace(as_role(broker), authentication=Token(file=file), admin_url=None)
    with source_at(connection, topic).open() as stream:
        rows = take(stream, 100)
        with closing(PulsarAdmin(broker.connection)) as admin:
            wait_until(lambda: not consumers(admin, topic), deadline_s=deadline(30))
        produce(Workload(100, 10), broker.connection, topic)
        renew(broker, file, 3600, ROLE)
        assert rows + take(stream, 100) == 200


def consumers(admin: PulsarAdmin, topic: str) -> int:
    found = [admin.subscription(TopicPartition(FULL + topic, i), "billing") for i in range(2)]
    return sum(len(one["consumers"]) for one in found if one)


def test_an_expired_token_at_a_restart_from_a_checkpoint_is_reported_at_once(
    broker: DevBroker, topic: str
) -> None:
    with source_at(as_role(broker), topic).open() as stream:
        batch = stream.next_batch(timeout_s=deadline(20))
        assert batch
        stream.commit(batch)
    began = time.monotonic()
    expired = replace(as_role(broker, -60), admin_url=None, operation_timeout_ms=HOUR_MS)
    with pytest.raises(AuthenticationError, match="expired at"):
        source_at(expired, topic, subscribe_timeout_ms=HOUR_MS).open(batch.checkpoint)
    in_time(began + SOON_S, "the start with an expired token took longer")


class Issuer(BaseHTTPRequestHandler):
    """Gives tokens for one secret."""

    token = ""
    given = 0

    def do_GET(self) -> None:
        self._answer(200, {"token_endpoint": f"http://{self.headers['Host']}/token"})

    def do_POST(self) -> None:
        asked = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        if asked["client_secret"] != [SECRET]:
            self._answer(401, {"error": "invalid_client"})
        else:
            Issuer.given += 1
            self._answer(200, {"access_token": self.token, "expires_in": 3600})

    def _answer(self, status: int, output: dict[str, object]) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(output).encode())

    def log_message(self, *_: object) -> None:
        pass


def test_client_credentials_of_an_issuer_are_admitted_and_wrong_ones_refused(
    broker: DevBroker, topic: str
) -> None:
    Issuer.token = broker.signer.token(ROLE)
    with HTTPServer(("127.0.0.1", 0), Issuer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        good = OAuth2(issuer_url=url, client_id="billing", client_secret=SECRET)
        assert rows_of(replace(as_role(broker), authentication=good), topic) == 100
        assert Issuer.given == 1  # for the client and the admin interface
        bad = replace(good, client_secret="another")
        connection = replace(as_role(broker), authentication=bad)
        refused(broker, connection, f"{topic}-x", AuthenticationError, "invalid_client")
        server.shutdown()
    # A second client: the token of the first may still be valid.
    new = replace(good, scope="another")
    with pytest.raises(BrokerUnavailableError, match="issuer_url"):
        source_at(replace(as_role(broker), authentication=new), topic).open()


@pytest.fixture
def client_conf(broker: DevBroker, tmp_path: Path) -> Path:
    token, conf = tmp_path / "token", tmp_path / "client.conf"
    token.write_text(broker.signer.token("admin"))
    conf.write_text(
        f"brokerServiceUrl={broker.service_url}\nwebServiceUrl={broker.admin_url}\n"
        f"authPlugin=org.apache.pulsar.client.impl.auth.AuthenticationToken\n"
        f"authParams=file://{token}\ntlsTrustCertsFilePath={broker.authority.path}\n"
        "tlsEnableHostnameVerification=true\n"
    )
    return conf


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str]:
    with pytest.raises(SystemExit) as caught:
        main([*arguments])
    output = capsys.readouterr()
    return caught.value.code, output.out + output.err


def test_commands_take_a_client_conf(
    broker: DevBroker, topic_name: str, client_conf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    conf = ("--client-conf", str(client_conf))
    asked = ("produce", topic_name, "--messages", "100", "--keys", "5", "--partitions", "2")
    code, output = command(capsys, *asked, *conf)
    assert code == 0, output
    code, output = command(capsys, "doctor", "--topic", topic_name, "--subscription", "s", *conf)
    assert code == 0, output
    live = ("check", "--live", "--topic", f"{topic_name}-live", "--messages", "200", "--keys", "5")
    code, output = command(capsys, *live, *conf)
    assert code == 0, output
    expired = broker.signer.token(ROLE, -60)
    own = ("--auth-plugin", "token", "--auth-params", f"token:{expired}")
    code, output = command(
        capsys, "doctor", "--topic", topic_name, "--subscription", "s", *conf, *own
    )
    assert code == 1
    assert "rejects role 'billing-app'" in " ".join(output.split())
    assert expired not in output


def test_a_running_source_is_found_by_its_client_conf(
    broker: DevBroker, topic: str, client_conf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = source_at(broker.connection, topic)
    seen: list[Message] = []
    thread = threading.Thread(target=lambda: source.run(seen.append))
    thread.start()
    try:
        wait_until(lambda: len(seen) == 100, deadline_s=deadline(30))
        code, output = command(capsys, "status", "billing", "--client-conf", str(client_conf))
        assert code == 0
        assert topic in output
    finally:
        source.stop()
        joined(thread, deadline(30))


def test_a_role_that_may_not_park_keeps_the_message(broker: DevBroker, topic: str) -> None:
    reader = "reader-app"
    with closing(AdminHttp(broker.connection)) as admin:
        path = f"/admin/v2/namespaces/public/default/permissions/{reader}"
        assert admin.request("POST", path, json=["consume"]).is_success
    token = Token(broker.signer.token(reader))
    source = source_at(replace(broker.connection, authentication=token), topic)

    def reject(_message: Message) -> None:
        raise Reject("no")

    with pytest.raises(KeyShardError) as caught:
        source.run(reject)
    text = str(caught.value)
    assert f"Role {reader!r} lacks the permission 'produce'" in text, text
    assert f"{topic}-billing-DLQ" in text
    with closing(PulsarAdmin(broker.connection)) as asked:
        found = [asked.subscription(TopicPartition(FULL + topic, i), "billing") for i in range(2)]
    assert sum(one["msgBacklog"] for one in found if one) == messages(broker, topic)


def messages(broker: DevBroker, topic: str) -> int:
    """Entries that are stored of a topic."""
    with closing(AdminHttp(broker.connection)) as admin:
        paths = [f"/admin/v2/persistent/public/default/{topic}-partition-{i}" for i in range(2)]
        output = [admin.request("GET", f"{path}/internalStats").json() for path in paths]
    return sum(int(one["entriesAddedCounter"]) for one in output)
