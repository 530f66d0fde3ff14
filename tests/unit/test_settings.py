"""Settings from ``client.conf``, TOML and the environment: their order, origins and errors."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from keyshard import Connection, HandlerConfig, KeyShardSink, KeyShardSource, Token, read_settings
from keyshard.cli import main
from keyshard.cli.connecting import connection_of
from keyshard.config.settings import RUN, SINK, SOURCE, Settings
from keyshard.config.sink import SinkConfig
from keyshard.config.source import SourceConfig
from keyshard.errors import ConfigError
from spark_adapter.option_parsing import parse_options, to_options

SECRET = "eyJhbGciOiJIUzI1NiJ9.secret"
CONF = f"""
# of the cluster
brokerServiceUrl=pulsar+ssl://conf:6651
webServiceUrl=https://conf:8443
authPlugin=org.apache.pulsar.client.impl.auth.AuthenticationToken
authParams=token:{SECRET}
operationTimeoutMs=11000
"""
TOML = """
[connection]
client_conf = "client.conf"
service_url = "pulsar+ssl://toml:6651"
operation_timeout_ms = 12000
tls_hostname_verification = false

[source]
topics = ["orders", "returns"]
subscription = "billing"
parallelism = 10

[run]
lanes = 32
drain_timeout_s = 5

[sink]
topic = "bills"
sink_id = "billing"
compression = "zstd"
"""


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    (tmp_path / "client.conf").write_text(CONF)
    (tmp_path / "keyshard.toml").write_text(TOML)
    return tmp_path / "keyshard.toml"


def origins(settings: Settings) -> dict[str, str]:
    return {f"{one.table}.{one.name}": one.origin for one in settings.all()}


def test_each_place_overrides_the_ones_before_it(toml: Path) -> None:
    environ = {
        "KEYSHARD_CONFIG": str(toml),
        "KEYSHARD_OPERATION_TIMEOUT_MS": "13000",
        "KEYSHARD_PARALLELISM": "16",
        "KEYSHARD_RUN_RATE_LIMIT": "2.5",
        "KEYSHARD_SUBSCRIPTION": "",
        "KEYSHARD_SINK_COMPRESSION": "lz4",
        "KEYSHARD_SINK_LINGER_MS": "20",
        "HOME": "/",
    }
    settings = read_settings(environ=environ)
    connection = settings.connection()
    assert connection.service_url == "pulsar+ssl://toml:6651"
    assert connection.admin_url == "https://conf:8443"
    assert connection.authentication == Token(SECRET)
    assert connection.operation_timeout_ms == 13_000
    assert not connection.tls_hostname_verification
    source = KeyShardSource(**settings.for_source(subscription="audit"))
    assert source.topics == (
        "persistent://public/default/orders",
        "persistent://public/default/returns",
    )
    assert (source.subscription, source.parallelism) == ("audit", 16)
    assert source.connection == connection
    run = HandlerConfig(**settings.for_run(lanes=2))
    assert (run.lanes, run.drain_timeout_s, run.rate_limit) == (2, 5, 2.5)
    sink = KeyShardSink(**settings.for_sink(sink_id="audit"))
    assert sink.topic == "persistent://public/default/bills"
    assert (sink.sink_id, sink.compression, sink.linger_ms) == ("audit", "lz4", 20)
    assert sink.connection == connection
    found = origins(settings)
    conf = str(toml.parent / "client.conf")
    assert {name: origin for name, origin in found.items() if origin != "default"} == {
        "connection.client_conf": f"file {toml}",
        "connection.service_url": f"file {toml}",
        "connection.admin_url": f"file {conf}",
        "connection.authentication": f"file {conf}",
        "connection.operation_timeout_ms": "environment KEYSHARD_OPERATION_TIMEOUT_MS",
        "connection.tls_hostname_verification": f"file {toml}",
        "source.topics": f"file {toml}",
        "source.subscription": f"file {toml}",
        "source.parallelism": "environment KEYSHARD_PARALLELISM",
        "run.lanes": f"file {toml}",
        "run.drain_timeout_s": f"file {toml}",
        "run.rate_limit": "environment KEYSHARD_RUN_RATE_LIMIT",
        "sink.topic": f"file {toml}",
        "sink.sink_id": f"file {toml}",
        "sink.compression": "environment KEYSHARD_SINK_COMPRESSION",
        "sink.linger_ms": "environment KEYSHARD_SINK_LINGER_MS",
    }


def test_the_settings_of_a_source_are_options_of_a_spark_stream(toml: Path) -> None:
    source = KeyShardSource(**read_settings(toml, environ={}).for_source())
    assert parse_options(to_options(source)) == source


def test_nothing_is_read_that_is_not_named(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(toml.parent)
    settings = read_settings(environ={})
    assert settings.connection() == KeyShardSource("t", subscription="s").how_to_connect()
    assert settings.for_run() == {}
    assert set(origins(settings).values()) == {"default"}
    assert settings.for_source(service_url="memory://a")["connection"].in_memory
    assert settings.for_sink(service_url="memory://a")["connection"].in_memory


def test_a_url_that_contradicts_the_connection_of_an_argument_is_refused() -> None:
    settings = read_settings(environ={})
    given = {"connection": Connection("memory://a"), "service_url": "memory://b"}
    for made in (
        lambda: KeyShardSource("t", subscription="s", **settings.for_source(**given)),
        lambda: KeyShardSink("t", **settings.for_sink(**given)),
    ):
        with pytest.raises(ConfigError, match="service_url is given, but the connection"):
            made()


def test_the_arguments_name_other_files(toml: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.conf"
    other.write_text("serviceUrl=pulsar+ssl://other:6651")
    environ = {"KEYSHARD_CONFIG": "/missing", "KEYSHARD_CLIENT_CONF": "/missing"}
    settings = read_settings(toml, client_conf=other, environ=environ)
    assert settings.connection().admin_url is None
    options = {"serviceUrl": "pulsar+ssl://option:6651"}
    settings = read_settings(toml, environ={}, options=options)
    assert settings.connection().service_url == "pulsar+ssl://option:6651"


def test_another_authentication_replaces_the_whole(toml: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(SECRET)
    environ = {"KEYSHARD_AUTH_PARAMS": f"file://{token}"}
    settings = read_settings(toml, environ=environ)
    assert settings.connection().authentication == Token(file=str(token))
    assert origins(settings)["connection.authentication"] == "environment KEYSHARD_AUTH_PARAMS"
    with pytest.raises(ConfigError, match="authParams is missing"):
        read_settings(toml, environ={"KEYSHARD_AUTH_PLUGIN": "basic"})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[sources]\n", r"keyshard.toml has no option 'sources'.\nRemedy: Did you mean 'source'"),
        ("[source]\nparalelism = 3\n", "Did you mean 'parallelism'"),
        ("[run]\nretry = 3\n", r"\[run\] of .* has no option 'retry'"),
        ("[sink]\ncompresion = 'lz4'\n", "Did you mean 'compression'"),
        ("[sink]\nservice_url = 'memory://a'\n", r"\[sink\] of .* has no option 'service_url'"),
        ("[connection]\nauthentication = 'x'\n", "no option 'authentication'"),
        ("source = 3\n", "source of .* is no table"),
        ("[connection]\nservice_url = 3.5\n", r"service_url of \[connection\] is 3.5"),
        ("[connection]\nservice_url = 'http://x'\n", "service_url comes from file .*keyshard.toml"),
        ("[connection]\nauth_params = 3.5\n", "auth_params of .* is no text"),
        ("[source\n", "is not valid TOML: .*line 1"),
        ("[source]\nx = " + "[" * 100_000, "is not valid TOML"),
        ("\x00", "is not valid TOML"),
        ("# " + "x" * 1_100_000, "more than 1,048,576 bytes"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "keyshard.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_settings(path, environ={})


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_settings(tmp_path / "missing.toml", environ={})
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_settings(tmp_path, environ={})
    (tmp_path / "latin.toml").write_bytes(b"[source]\nsubscription = '\xe9'\n")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        read_settings(tmp_path / "latin.toml", environ={})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("KEYSHARD_PARALLELISM", "many", "KEYSHARD_PARALLELISM is 'many'; it must be an integer"),
        ("KEYSHARD_RUN_RATE_LIMIT", "fast", "it must be a number"),
        ("KEYSHARD_FAIL_ON_DATA_LOSS", "yes", "it must be true or false"),
        ("KEYSHARD_SINK_LINGER_MS", "5ms", "KEYSHARD_SINK_LINGER_MS is '5ms'; it must be an int"),
        (
            "KEYSHARD_OPERATION_TIMEOUT_MS",
            "5s",
            "comes from environment KEYSHARD_OPERATION_TIMEOUT",
        ),
        ("KEYSHARD_SERVICE_URL", "x", "service_url comes from environment KEYSHARD_SERVICE_URL"),
    ],
)
def test_a_bad_variable_is_refused(name: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_settings(environ={name: value})


def test_every_field_can_be_set_by_its_variable() -> None:
    """The text of a default, or of an example, becomes a valid value of its field again."""
    examples: dict[str, Any] = {
        "topics": "a, b", "subscription": "s", "batch_rows_max": "100", "batch_rows_min": "10",
        "batch_bytes_max": "1000", "admin_url": "http://h:1", "starting_position": "latest",
        "rate_limit": "0.5", "rate_burst": "3", "workers": "4", "metrics_port": "9464",
        "dead_letter_topic": "d", "checkpoint": "/tmp/c.json", "metadata_columns": "__keyBytes",
        "topic": "t", "sink_id": "i",
    }  # fmt: skip
    needed: dict[str, dict[str, Any]] = {
        "source": {"topics": "t", "subscription": "s"},
        "run": {"rate_limit": 5},
        "sink": {"topic": "t", "value_format": "auto"},
    }
    for table, config, names, prefix, own_of in (
        ("source", SourceConfig, SOURCE, "", Settings.for_source),
        ("run", HandlerConfig, RUN, "RUN_", Settings.for_run),
        ("sink", SinkConfig, SINK, "SINK_", Settings.for_sink),
    ):
        for one in fields(config):
            if one.name not in names or one.name == "topics_pattern":
                continue
            plain = str(one.default)
            text = examples.get(one.name) or (
                plain.lower() if isinstance(one.default, bool) else plain
            )
            if table == "source" and one.name == "workers":
                text = "processes:2"
            if one.default is None and one.name not in examples:
                continue
            settings = read_settings(environ={f"KEYSHARD_{prefix}{one.name.upper()}": text})
            own = own_of(settings)
            assert one.name in own
            made = config(**needed[table] | own)
            assert str(getattr(made, one.name)).lower()


def test_the_command_shows_values_and_origins_and_hides_secrets(
    toml: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KEYSHARD_CONFIG", str(toml))
    monkeypatch.setenv("KEYSHARD_ADMIN_URL", "https://user:hidden-word@env:8443")
    monkeypatch.setenv("KEYSHARD_AUTH_PLUGIN", "tls")
    monkeypatch.setenv("KEYSHARD_TLS_CERTIFICATE_FILE_PATH", str(toml))
    monkeypatch.setenv("KEYSHARD_TLS_KEY_FILE_PATH", str(toml))
    monkeypatch.setenv("KEYSHARD_PARALLELISMUS", "3")
    monkeypatch.setenv("KEYSHARD_SINK_METRICS_PORT", "9465")
    monkeypatch.setenv("KEYSHARD_RUN_UI_TOKEN", "hidden-word-of-the-page")
    with pytest.raises(SystemExit) as ended:
        main(["config", "show"])
    assert not ended.value.code
    text = capsys.readouterr().out
    assert "hidden-word" not in text
    assert (
        "KEYSHARD_PARALLELISMUS in the environment sets nothing. Did you mean "
        "'KEYSHARD_PARALLELISM'?"
    ) in " ".join(text.split())
    for line in (
        "sink.sink_id billing file", "sink.metrics_port 9465 environment KEYSHARD_SINK_METRICS_PORT"
    ):  # fmt: skip
        assert line in " ".join(text.split())
    assert "environment KEYSHARD_ADMIN_URL" in text
    assert "source.parallelism" in text
    assert "batch_rows_max" not in text

    monkeypatch.delenv("KEYSHARD_ADMIN_URL")
    monkeypatch.delenv("KEYSHARD_AUTH_PLUGIN")
    with pytest.raises(SystemExit):
        main(["config", "show", "--json", "--all"])
    shown = json.loads(capsys.readouterr().out)
    assert SECRET not in json.dumps(shown)
    values = {f"{one['table']}.{one['name']}": one for one in shown["settings"]}
    assert "***" in values["connection.authentication"]["value"]
    assert values["source.batch_tasks"]["origin"] == "default"
    assert shown["unused"] == ["KEYSHARD_PARALLELISMUS"]


def test_commands_connect_with_the_settings(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYSHARD_CONFIG", str(toml))
    assert connection_of(None, {}).service_url == "pulsar+ssl://toml:6651"
    given = {"service_url": "pulsar+ssl://option:6651"}
    assert connection_of(None, given).service_url == "pulsar+ssl://option:6651"
    assert connection_of(None, given).authentication == Token(SECRET)
    with pytest.raises(ConfigError, match="--service-url is 'x'"):
        connection_of(None, {"service_url": "x"})
