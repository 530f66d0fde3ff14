"""Connections: valid combinations, refused ones, and hidden secrets."""

from __future__ import annotations

import base64
import logging
import pickle
import re
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from keyshard import Basic, Connection, KeyShardSink, KeyShardSource, OAuth2, Secret, Token
from keyshard.broker import connect as connecting
from keyshard.broker.auth.credentials import Credentials
from keyshard.broker.client.broker import ClientBroker
from keyshard.broker.connect import connect, decoder_of, transport_of
from keyshard.broker.wire import native_decoder
from keyshard.broker.wire.broker import WireBroker
from keyshard.cli.connecting import connection_of
from keyshard.config.connection_names import fields_of, names_of, read_client_conf
from keyshard.errors import AuthenticationError, ConfigError, KeyShardError
from keyshard.redaction import redacted
from spark_adapter.option_parsing import parse_options, to_options

SECRET = "s3cr3t-of-nobody"
TLS = "pulsar+ssl://broker:6651"


@pytest.fixture
def pem(tmp_path: Path) -> str:
    path = tmp_path / "some.pem"
    path.write_text("no certificate\n")
    return str(path)


def refusal(**given: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        Connection(**given)
    text = caught.value.message
    assert "\n" not in text
    assert SECRET not in text
    return text


def test_contradicting_options_are_refused(pem: str) -> None:
    assert "tls_key_file_path is missing" in refusal(service_url=TLS, tls_certificate_file_path=pem)
    assert "certificate_file_path is missing" in refusal(service_url=TLS, tls_key_file_path=pem)
    assert "without TLS" in refusal(tls_trust_certs_file_path=pem)
    assert "cannot be read" in refusal(service_url=TLS, tls_trust_certs_file_path=pem + "x")
    assert "Give only one" in refusal(
        admin_url=f"http://ann:{SECRET}@h:1", authentication=Basic("ann", SECRET)
    )
    assert "in-memory" in refusal(service_url="memory://x", authentication=Token(SECRET))
    assert "transport" in refusal(service_url="memory://x", transport="wire")
    assert "'auto', 'client' or 'wire'" in refusal(transport="tcp")
    assert "authentication is" in refusal(authentication="token")
    assert "listener_name" in refusal(listener_name="")


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"authentication": Token(SECRET)},
        {"authentication": Basic("ann", SECRET)},
        {"authentication": OAuth2(issuer_url="https://i/x", client_id="a", client_secret=SECRET)},
        {"service_url": TLS, "tls_hostname_verification": False},
        {"service_url": "pulsar://one:1,other:1", "listener_name": "outside"},
    ],
)
def test_auto_takes_the_wire_for_every_connection(said: dict[str, Any]) -> None:
    connection = Connection(**said, transport="auto")
    assert transport_of(connection) == "wire"
    with closing(connect(connection)) as broker:
        assert isinstance(broker, WireBroker)
    with closing(connect(replace(connection, transport="client"))) as broker:
        assert isinstance(broker, ClientBroker)


def test_the_transport_and_its_decoder_are_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    auto, client = Connection(transport="auto"), Connection(transport="client")
    assert decoder_of(client) is None
    assert transport_of(Connection("memory://x")) == "memory"
    assert decoder_of(Connection("memory://x")) is None
    monkeypatch.setattr(native_decoder, "_library", None)
    assert decoder_of(auto) == "python"
    monkeypatch.setattr(native_decoder, "_library", object())
    assert decoder_of(auto) == "compiled"
    connecting._tell.cache_clear()
    with caplog.at_level(logging.INFO, connecting.__name__):
        for connection in (auto, client, auto, auto):
            connect(connection).close()
    assert [record.getMessage() for record in caplog.records] == [
        "consuming and reading by transport wire, entries decoded by compiled code",
        "consuming and reading by transport client",
    ]


def test_a_process_that_decodes_in_python_logs_the_reason_and_the_cost_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reason = tmp_path / "_not_compiled.txt"
    reason.write_text("rustc does not work: error: no toolchain\n")
    monkeypatch.setattr(native_decoder, "REASON", reason)
    monkeypatch.setattr(native_decoder, "_library", None)
    connecting._tell.cache_clear()
    with caplog.at_level(logging.INFO, connecting.__name__):
        for _ in range(3):
            connect(Connection()).close()
    assert [record.getMessage() for record in caplog.records] == [
        "consuming and reading by transport wire, entries decoded by python code",
        f"{connecting.decoded_in_python()} {connecting.COMPILED_REMEDY}",
    ]
    assert {record.levelname for record in caplog.records} == {"INFO"}
    assert "in Python, because rustc does not work: error: no toolchain. That takes" in (
        connecting.decoded_in_python()
    )
    reason.unlink()
    assert "because the compiled code of this install does not fit this machine" in (
        connecting.decoded_in_python()
    )


def test_the_cost_of_decoding_in_python_is_that_of_the_benchmarks() -> None:
    figures = re.findall(r"\d+\.\d+", connecting.PYTHON_COST)
    assert len(figures) == 4
    page = (Path(__file__).parents[2] / "bench" / "README.md").read_text()
    large, small = re.findall(r"^\| (?:4 of 1,000|20 of 3) \| (.+) \|$", page, re.MULTILINE)
    assert [*large.split(" | "), *small.split(" | ")] == figures
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "install.md").read_text()
    assert re.findall(r"(\d+\.\d+) us\b", page) == figures


def test_commands_take_a_transport_and_name_its_option() -> None:
    assert connection_of(None, {"transport": "wire"}).transport == "wire"
    with pytest.raises(ConfigError, match=r"^\[\w+\] --transport is 'tcp'.\nRemedy: Write "):
        connection_of(None, {"transport": "tcp"})


@pytest.mark.parametrize("name", [field.name for field in fields(Connection)])
def test_a_connection_refuses_hostile_values_by_a_sentence(name: str) -> None:
    for value in [b"x", "\ud800", "a\0b", -1, 10**40, object(), [None], {"a": 1}]:
        output = refusal(**{name: value})
        assert name in output


@pytest.mark.parametrize(
    "make",
    [
        Token,
        lambda: Token(SECRET, file="/x"),
        lambda: Token(SECRET + "\n\x00"),
        lambda: Token(""),
        lambda: Token(file="/no/such/file"),
        lambda: Token(environment="KEYSHARD_NO_SUCH_VARIABLE"),
        lambda: Basic("ann:b", SECRET),
        lambda: Basic("ann", ""),
        lambda: OAuth2(issuer_url="nowhere", client_id="a", client_secret=SECRET),
        lambda: OAuth2(issuer_url="https://i", client_id="a"),
        lambda: OAuth2(issuer_url="https://i"),
    ],
)
def test_an_impossible_authentication_is_refused(make: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert SECRET not in str(caught.value)


def test_a_secret_is_not_shown_and_survives_a_pickle() -> None:
    secret = Secret(SECRET)
    for shown in (repr(secret), str(secret), f"{secret}", f"{[secret]}"):
        assert SECRET not in shown
    source = KeyShardSource("t", connection=Connection(TLS, authentication=Token(SECRET)))
    for value in (source, source.connection, Basic("ann", SECRET)):
        assert SECRET not in repr(value) + str(value)
    assert SECRET not in str(KeyShardError(f"With token:{SECRET}.", connection=source.connection))
    again = pickle.loads(pickle.dumps(source))
    assert again == source
    assert again.connection.authentication.value.reveal() == SECRET
    assert Secret("a") != Secret("b")


def test_no_token_is_shown_in_any_message() -> None:
    token = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhcHAifQ.c2lnbmF0dXJl"
    assert redacted(f"bad {token}, sorry") == "bad ***, sorry"


@pytest.mark.parametrize("made", [KeyShardSource, KeyShardSink])
def test_shorthands_and_a_connection_are_the_same(
    made: type[KeyShardSource] | type[KeyShardSink],
) -> None:
    short = made("t", service_url=TLS, admin_url="http://h:1")
    given = made("t", connection=Connection(TLS, "http://h:1"))
    assert short.how_to_connect() == given.how_to_connect()
    assert (given.service_url, given.admin_url) == (TLS, "http://h:1")
    with pytest.raises(ConfigError, match="service_url is given, but the connection"):
        made("t", service_url="pulsar://other:1", connection=Connection(TLS))
    with pytest.raises(ConfigError, match="admin_url is given, but the connection"):
        made("t", admin_url="http://other:1", connection=Connection(TLS, "http://h:1"))


def test_a_source_is_made_again_with_another_connection() -> None:
    first = Connection(TLS, "https://h:1", operation_timeout_ms=5_000)
    other = Connection("pulsar://other:1")
    source = KeyShardSource("t", connection=first)
    assert replace(source, parallelism=3).how_to_connect() == first
    moved = replace(source, connection=other)
    assert moved == KeyShardSource("t", connection=other)
    assert (moved.service_url, moved.admin_url) == ("pulsar://other:1", None)
    assert moved.operation_timeout_ms == other.operation_timeout_ms
    back = replace(pickle.loads(pickle.dumps(moved)), connection=first, parallelism=3)
    assert back == KeyShardSource("t", connection=first, parallelism=3)
    assert replace(source, connection=other, service_url="pulsar://other:1") == moved


@pytest.mark.parametrize(
    "changes",
    [
        {"service_url": "pulsar://third:1"},
        {"connection": Connection("pulsar://other:1"), "service_url": "pulsar://third:1"},
    ],
)
def test_a_source_is_not_made_again_with_a_contradiction(changes: dict[str, Any]) -> None:
    source = KeyShardSource("t", connection=Connection(TLS))
    with pytest.raises(ConfigError, match="service_url is given, but the connection"):
        replace(source, **changes)


def test_a_source_without_its_connection_keeps_the_urls() -> None:
    source = KeyShardSource("t", connection=Connection(TLS, "https://h:1"))
    assert replace(source, connection=None) == KeyShardSource(
        "t", service_url=TLS, admin_url="https://h:1"
    )


def test_a_pattern_of_topics_asks_the_admin_interface_of_the_connection() -> None:
    with_admin, without = Connection(TLS, "https://h:1"), Connection(TLS)
    source = KeyShardSource(topics_pattern="a/b/c.*", connection=with_admin)
    for make in (
        lambda: KeyShardSource(topics_pattern="a/b/c.*", connection=without),
        lambda: replace(source, connection=without),
    ):
        with pytest.raises(ConfigError, match="topics_pattern needs the admin interface"):
            make()


CLIENT_CONF = """
# Configuration of a client
webServiceUrl=https://broker:8443/
brokerServiceUrl=pulsar+ssl://broker:6651/
authPlugin=org.apache.pulsar.client.impl.auth.AuthenticationToken
authParams=token:{secret}
tlsAllowInsecureConnection=false
tlsEnableHostnameVerification=false
tlsTrustCertsFilePath={pem}
tlsCertificateFilePath=
useKeyStoreTls=false
tlsTrustStoreType=JKS
webserviceTlsProvider=
proxyServiceUrl=
"""


def test_a_client_conf_is_a_connection(tmp_path: Path, pem: str) -> None:
    conf = tmp_path / "client.conf"
    conf.write_text(CLIENT_CONF.format(secret=SECRET, pem=pem))
    made = Connection(**read_client_conf(conf))
    assert made == Connection(
        "pulsar+ssl://broker:6651/", "https://broker:8443/", authentication=Token(SECRET),
        tls_trust_certs_file_path=pem, tls_hostname_verification=False,
    )  # fmt: skip
    assert Connection(**fields_of(names_of(made))) == made
    for text, output in [
        (b"nonsense", "Line 1"),
        (b"tlsTrustCerts=x", "Did you mean"),
        (b"\xff", "no"),
    ]:
        conf.write_bytes(text)
        with pytest.raises(ConfigError, match=output):
            read_client_conf(conf)


@pytest.mark.parametrize(
    ("given", "output"),
    [
        ({"authParams": SECRET}, "without authPluginClassName"),
        ({"authPluginClassName": "token"}, "authParams is missing"),
        (
            {"authPluginClassName": "org.x.AuthenticationAthenz", "authParams": SECRET},
            "Write token",
        ),
        ({"authPluginClassName": "basic", "authParams": SECRET}, "JSON"),
        ({"authPluginClassName": "basic", "authParams": f'{{"userId":"{SECRET}"}}'}, "userId and"),
        ({"authPluginClassName": "oauth2", "authParams": "[" * 10_000}, "JSON"),
        ({"authPluginClassName": "tls"}, "tlsCertFile"),
        ({"tlsAllowInsecureConnection": "true"}, "is not supported"),
        ({"useKeyStoreTls": "true"}, "PEM"),
        ({"proxyServiceUrl": "x"}, "proxy"),
        ({"memoryLimitBytes": "1000"}, "window_bytes_max"),
        ({"serviceUrl": "pulsar://a:1", "brokerServiceUrl": "pulsar://b:1"}, "twice"),
        ({"tlsHostnameVerificationEnable": "yes"}, "true or false"),
        ({"connectionTimeoutMs": "1s"}, "integer"),
        ({"listenrName": "x"}, "listenerName"),
    ],
)
def test_an_unusable_client_option_is_refused_in_one_line_without_its_secret(
    given: dict[str, str], output: str
) -> None:
    with pytest.raises(ConfigError, match=output) as caught:
        fields_of(given)
    assert SECRET not in str(caught.value)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "authentication",
    [
        Token(SECRET),
        Basic("ann", SECRET),
        OAuth2(issuer_url="https://i/x", client_id="a", client_secret=SECRET, audience="urn:p"),
    ],
)
def test_spark_options_and_connections_convert_both_ways(authentication: Any) -> None:
    connection = Connection(
        TLS, "https://h:1", authentication=authentication, listener_name="outside",
        connection_timeout_ms=5_000, operation_timeout_ms=7_000, tls_hostname_verification=False,
        transport="wire",
    )  # fmt: skip
    source = KeyShardSource("t", subscription="s", connection=connection)
    assert parse_options(to_options(source)) == source


def test_spark_options_are_refused_by_their_names() -> None:
    given = {"topic": "t", "subscription": "s", "pulsar.client.tlstrustcertsfilepath": "/no/file"}
    with pytest.raises(ConfigError, match=r"^\[\w+\] pulsar.client.tlsTrustCertsFilePath is"):
        parse_options(given | {"service.url": TLS})


def test_a_description_names_the_role_and_no_secret(tmp_path: Path) -> None:
    def who(**given: Any) -> str:
        return Credentials(Connection(TLS, **given)).who()

    file = tmp_path / "token"
    file.write_text("x\n")
    made = Connection(TLS, authentication=Token(file=file))
    assert Credentials(made).show().data == "x"
    file.write_text(" \n")
    with pytest.raises(AuthenticationError, match="contains no token"):
        Credentials(made).show()
    file.unlink()
    assert "cannot be read" in Credentials(made).who()
    assert who(authentication=Basic("ann", SECRET)) == "user 'ann'"
    for claims in (
        b"{}",
        b'{"sub": 5, "exp": 1}',
        b'{"sub": "app", "exp": 1e300}',
        b"[]",
        b'{"exp": "x"}',
    ):
        body = base64.urlsafe_b64encode(claims).decode().rstrip("=")
        assert SECRET not in who(authentication=Token(f"eyJ.{body}.{SECRET}"))
    assert "without a role" in who(authentication=Token(SECRET))
    assert who() == "a client without authentication"


def test_a_secret_in_the_clear_is_seen() -> None:
    token = Token(SECRET)
    assert Connection("pulsar://h:1", authentication=token).says_secrets_in_the_clear
    assert Connection("pulsar://127.0.0.1.evil:1", authentication=token).says_secrets_in_the_clear
    assert Connection(TLS, "http://h:1", authentication=token).says_secrets_in_the_clear
    for url in ("pulsar://127.0.0.1:6650", "pulsar://localhost", TLS):
        assert not Connection(url, authentication=token).says_secrets_in_the_clear
    assert not Connection("pulsar://h:1").says_secrets_in_the_clear


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("pulsar://broker.example:6652", ("broker.example", 6652)),
        ("pulsar://broker.example/", ("broker.example", 6650)),
        ("pulsar+ssl://broker.example", ("broker.example", 6651)),
        ("pulsar://[::1]:6650", ("::1", 6650)),
        ("pulsar://one:6650,two:6650", None),
        ("memory://cluster", None),
    ],
)
def test_a_url_with_one_host_is_an_address(url: str, address: tuple[str, int] | None) -> None:
    assert Connection(url).address == address


def test_nothing_is_logged_by_describing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        Connection(TLS, authentication=Token(SECRET))
    assert caplog.records == []
