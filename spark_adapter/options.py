"""The options of ``format("keyshard")``: one table, from which ``docs/options.md`` is made."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from keyshard import Connection, KeyShardSource
from keyshard.config.connection_names import fields_of, names_of
from keyshard.config.field_types import of_type
from keyshard.config.source import SHORTHANDS
from keyshard.errors import ConfigError
from keyshard.redaction import shown


class Option(NamedTuple):
    """One option: its Spark name, the field of KeyShardSource behind it, and what it means."""

    name: str
    field: str
    meaning: str


OPTIONS = (
    Option("service.url", "service_url", "Where the broker is."),
    Option(
        "admin.url",
        "admin_url",
        "Admin REST interface, `http://host:port`. Optional; with it keyshard checks that topics "
        "exist, names the cluster in the checkpoint and the other side of a conflict in errors.",
    ),
    Option(
        "topic",
        "topics",
        "One topic. Exactly one of `topic`, `topics` and `topicsPattern` is needed.",
    ),
    Option("topics", "topics", "Several topics, separated by commas."),
    Option(
        "topicsPattern",
        "topics_pattern",
        "Topics whose whole name matches: `regex` (in `public/default`), `tenant/namespace/regex` "
        "or `persistent://tenant/namespace/regex`, as Python's `re` reads it. Partition suffixes "
        "are no part of the name; system topics (`__...`) never match. Needs `admin.url`.",
    ),
    Option(
        "partitionDiscoveryIntervalMillis",
        "discovery_interval_ms",
        "Time between two looks for new topics and topic partitions. What is found while the query "
        "runs is read from its beginning.",
    ),
    Option(
        "subscription",
        "subscription",
        "Subscription that holds the backlog. **Required.** One query at a time may use it.",
    ),
    Option(
        "transport",
        "transport",
        "What consumes and reads: `wire`, keyshard itself by Pulsar's binary protocol, which takes "
        "whole entries and costs less; `client`, pulsar-client; or `auto`, which is `wire`.",
    ),
    Option(
        "parallelism",
        "parallelism",
        "Number of hash ranges, and so of Spark tasks with data, whatever the number of topic "
        "partitions. May change between runs.",
    ),
    Option(
        "startingOffsets",
        "starting_position",
        "`earliest` or `latest`: where a subscription begins that does not exist at the first "
        "start. A checkpoint, then an existing subscription, come before it.",
    ),
    Option(
        "maxOffsetsPerTrigger",
        "batch_rows_max",
        "Most rows of one micro-batch, split over topic partitions by what they have. Unset: half "
        "of `windowMaxRows`.",
    ),
    Option(
        "maxBytesPerTrigger",
        "batch_bytes_max",
        "Most payload of one micro-batch, bytes; a single larger entry is taken alone.",
    ),
    Option(
        "minOffsetsPerTrigger",
        "batch_rows_min",
        "Fewest rows of one micro-batch: less waits, until `maxTriggerDelay` or a full window.",
    ),
    Option(
        "maxTriggerDelay",
        "batch_delay_max_ms",
        "Longest wait for `minOffsetsPerTrigger`: a number with a unit (`500ms`, `30s`, `15m`, "
        "`1h`), or milliseconds.",
    ),
    Option(
        "onMisrouted",
        "on_misrouted",
        "`warn` or `fail` when a message is outside the range that received it: its producer "
        "batches by default instead of by key, and order per key is lost.",
    ),
    Option(
        "onCorrupt",
        "on_corrupt",
        "`fail` or `skip` when an entry cannot be read: the query ends before it, or acknowledges "
        "it, counts it in `corruptSkipped` and leaves it out. `skip` is refused with `transport` "
        "`client`: pulsar-client skips them all, and nobody is told.",
    ),
    Option(
        "windowMaxRows",
        "window_rows_max",
        "Most rows held, received and not yet committed, over all ranges. Keep it below what the "
        "broker leaves unacknowledged: 200,000 per topic partition by default.",
    ),
    Option("windowMaxBytes", "window_bytes_max", "Most memory of those rows, bytes."),
    Option(
        "workers",
        "workers",
        "What has the consumers: `embedded`, the query's process on the driver; `processes:4`, so "
        "many processes beside it, each a core for receiving; `spark:4`, processes on executors, "
        "which `spark_adapter.start_workers(spark, 4)` hosts, and which tasks get rows from; "
        "`ray:4`, so many actors of a Ray cluster (`ray:4?num_cpus=1`); or another place that is "
        "installed.",
    ),
    Option(
        "workerHost",
        "worker_host",
        "Address of the driver's machine under which executors reach it. Loopback serves local "
        "mode only.",
    ),
    Option(
        "subscribeTimeoutMillis",
        "subscribe_timeout_ms",
        "Longest wait for ranges that somebody else still holds, such as a crashed run.",
    ),
    Option(
        "operationTimeoutMillis",
        "operation_timeout_ms",
        "Longest time of one request to the broker, and of reaching it when a query goes on from "
        "its checkpoint; whole seconds. A first start gives up within 5 s.",
    ),
    Option(
        "availableNowTimeoutMillis",
        "available_now_timeout_ms",
        "`trigger(availableNow=True)`: longest wait for a row, or for proof that no more comes.",
    ),
    Option(
        "settleAfterMillis",
        "settle_after_ms",
        "How long the broker must call an entry acknowledged that this query never got before it "
        "counts as settled. Needs `admin.url`.",
    ),
    Option(
        "maxCheckpointBytes",
        "checkpoint_bytes_max",
        "Size of a checkpoint at which the fast ranges of a topic partition wait for slow ones.",
    ),
    Option(
        "failOnDataLoss",
        "fail_on_data_loss",
        "Whether the query fails when a planned batch is no longer stored, or entries were "
        "acknowledged that no batch holds. `false` warns, counts them in `entriesLost`, goes on.",
    ),
)

CLIENT = "pulsar.client."
"""Beginning of the options that Pulsar's Java client has, too."""
CONNECTION_OPTIONS = (
    Option(
        "authPluginClassName",
        "authentication",
        "How the query shows who it is: `token`, `tls`, `oauth2` or `basic`, or the Java class.",
    ),
    Option(
        "authParams",
        "authentication",
        "Its parameters. token: `file:///path` (read again at every connection, so it may be "
        "renewed), `env:NAME` or `token:...`. oauth2: JSON with `issuerUrl`, `privateKey` (a file "
        "with `client_id` and `client_secret`), `audience`, `scope`. basic: JSON with `userId`, "
        "`password`. tls: `tlsCertFile:/path,tlsKeyFile:/path`.",
    ),
    Option(
        "tlsTrustCertsFilePath",
        "tls_trust_certs_file_path",
        "PEM file of the authorities that are trusted. Unset: those of the package certifi.",
    ),
    Option(
        "tlsCertificateFilePath",
        "tls_certificate_file_path",
        "PEM file of the query's own certificate. Without other authentication it is who the query "
        "is.",
    ),
    Option("tlsKeyFilePath", "tls_key_file_path", "Its key, PEM, without a passphrase."),
    Option(
        "tlsHostnameVerificationEnable",
        "tls_hostname_verification",
        "Whether the certificate has to be that of the host in the URL. The Java client's default "
        "is `false`.",
    ),
    Option(
        "listenerName",
        "listener_name",
        "Which of the addresses that brokers advertise is used (`advertisedListeners`).",
    ),
    Option(
        "connectionTimeoutMs",
        "connection_timeout_ms",
        "Longest time until a connection of the client is there.",
    ),
)
"""Each is an option under its name after :data:`CLIENT`."""

_UNITS_MS = {"": 1, "ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000}
_DURATION = re.compile(r"(?P<number>[0-9]{1,18})\s*(?P<unit>ms|s|m|min|h|)")
_BY_NAME = {option.name.lower(): option for option in OPTIONS}
_INTEGERS, _BOOLEANS = of_type(KeyShardSource, int), of_type(KeyShardSource, bool)
_REQUIRED = {"subscription"}
"""Fields that a query has to name, also those with a default in Python."""


def parse_options(options: Mapping[str, str]) -> KeyShardSource:
    """Make a source of Spark's options; names are case-insensitive.

    Raises:
        ConfigError: An option is unknown, missing, given twice or wrong; names the option.
    """
    fields: dict[str, Any] = {}
    given: dict[str, str] = {}
    client: dict[str, str] = {}
    for name, text in options.items():
        if name.lower().startswith(CLIENT):
            client[name[len(CLIENT) :]] = text
            continue
        option = _BY_NAME.get(name.lower())
        if option is None:
            raise ConfigError(_unknown(name))
        if option.field in given:
            raise ConfigError(f"Give only one of {given[option.field]!r} and {option.name!r}.")
        given[option.field] = option.name
        fields[option.field] = _parse(option, text)
    if "topics" in given and "topics_pattern" in given:
        raise ConfigError(f"Give only one of {given['topics']!r} and 'topicsPattern'.")
    if not given.keys() & {"topics", "topics_pattern"}:
        raise ConfigError("No topic is given. Set option 'topic', 'topics' or 'topicsPattern'.")
    if not fields.keys() >= _REQUIRED:
        raise ConfigError(
            "Option 'subscription' is missing. Name the Pulsar subscription that holds the "
            "backlog of this query."
        )
    try:
        source = KeyShardSource(**_connected(fields, client))
    except ConfigError as exc:
        # Only the field's name at the start: what follows may be the user's own text.
        field, space, rest = exc.message.partition(" ")
        given |= {one.field: CLIENT + one.name for one in CONNECTION_OPTIONS}
        raise ConfigError(given.get(field, field) + space + rest) from exc
    if source.in_memory:
        raise ConfigError(
            f"service.url is {shown(source.service_url)}, which lives in one process; Spark reads "
            "in others. Give the URL of a broker: 'keyshard broker start' starts one."
        )
    return source


def _connected(fields: dict[str, Any], client: Mapping[str, str]) -> dict[str, Any]:
    """Fields of a source; the connection is one of them where URLs do not say it."""
    if not client:
        return fields
    said = fields_of(client)
    for name in said.keys() & SHORTHANDS:
        if fields.get(name, said[name]) != said[name]:
            raise ConfigError(f"{name} is given together with another one in {CLIENT}*. Give one.")
    kept = {name: value for name, value in fields.items() if name not in SHORTHANDS}
    shorthands = {name: value for name, value in fields.items() if name in SHORTHANDS}
    return {**kept, "connection": Connection(**shorthands, **{
        name: value for name, value in said.items() if name not in shorthands
    })}  # fmt: skip


def to_options(source: KeyShardSource) -> dict[str, str]:
    """The options that say what ``source`` says; the inverse of :func:`parse_options`.

    A secret that the source holds itself, in no file or variable, is among them.

    Raises:
        ConfigError: A field without an option differs from its default, or one of several topics
            has a comma in its name.
    """
    fields = {field.name: field for field in dataclasses.fields(source)}
    if source.topics_pattern is not None:
        options = {}
    elif len(source.topics) == 1:
        options = {"topic": source.topics[0]}
    elif any("," in topic for topic in source.topics):
        raise ConfigError(
            "Several topics cannot be set for Spark when one has a comma in its name."
        )
    else:
        options = {"topics": ",".join(source.topics)}
    known = {option.field: option.name for option in OPTIONS if option.field != "topics"}
    if source.connection is not None:
        said = {option.name for option in CONNECTION_OPTIONS}
        options |= {
            CLIENT + name: text
            for name, text in names_of(source.connection).items()
            if name in said
        }
    for name, field in fields.items():
        value = getattr(source, name)
        if name in ("topics", "connection") or (value == field.default and name not in _REQUIRED):
            continue
        if name not in known:
            raise ConfigError(f"{name} cannot be set for Spark; leave it at {field.default!r}.")
        options[known[name]] = str(value).lower() if name in _BOOLEANS else str(value)
    return options


def options_table() -> str:
    """The table of ``docs/options.md``, in Markdown."""
    defaults = {field.name: field.default for field in dataclasses.fields(KeyShardSource)}
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for option in OPTIONS:
        default = defaults[option.field]
        shown = "" if default is None or option.field in _REQUIRED else f"`{default}`"
        shown = shown.lower() if option.field in _BOOLEANS else shown
        lines.append(f"| `{option.name}` | {shown} | {option.meaning} |")
    plain = Connection()
    for option in CONNECTION_OPTIONS:
        value = getattr(plain, option.field)
        shown = "" if value is None else f"`{str(value).lower()}`"
        lines.append(f"| `{CLIENT}{option.name}` | {shown} | {option.meaning} |")
    return "\n".join(lines)


def _parse(option: Option, text: str) -> Any:
    if option.name == "topics":
        return [part for part in (piece.strip() for piece in text.split(",")) if part]
    if option.field in _BOOLEANS:
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"Option {option.name!r} is {shown(text)}; it must be true or false.")
        return text.lower() == "true"
    if option.field == "batch_delay_max_ms":
        return _milliseconds(option, text)
    if option.field not in _INTEGERS:
        return text
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"Option {option.name!r} is {shown(text)}; it must be an integer."
        ) from None


def _milliseconds(option: Option, text: str) -> int:
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None:
        raise ConfigError(
            f"Option {option.name!r} is {shown(text)}; write for example '30s' or '15m'."
        )
    return int(match["number"]) * _UNITS_MS[match["unit"]]


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), _BY_NAME, n=1, cutoff=0.0)
    return (
        f"Option {shown(name)} is unknown. Did you mean {_BY_NAME[near[0]].name!r}? "
        "All options stand in docs/options.md."
    )
