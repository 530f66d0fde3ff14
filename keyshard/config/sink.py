"""Options of a sink, validated on construction. Units are in the names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from keyshard.config.connection import SERVICE_URL, Connection, set_shorthands
from keyshard.config.field_types import short_repr
from keyshard.core.option_checks import (
    check_bool,
    check_choice,
    check_integer,
    check_text,
    suggesting_options,
)
from keyshard.core.position.entry import full_topic_name
from keyshard.errors import ConfigError
from keyshard.redaction import shown

MIB = 1024 * 1024


@suggesting_options
@dataclass(frozen=True, repr=False)
class SinkConfig:
    """Configuration of one sink."""

    topic: str
    """Name of the topic."""
    sink_id: str | None = field(default=None, kw_only=True)
    """Name by which the broker finds duplicates of ``write_batch``. It stays the same after a
    restart, and no other sink of the topic has it. Required for ``write_batch``, and for
    runs with a checkpoint."""
    connection: Connection | None = field(default=None, kw_only=True)
    """Connection to the cluster, if a URL is not enough: TLS, authentication, listener."""
    service_url: str = field(default=SERVICE_URL, kw_only=True)
    """URL of the broker. ``memory://name`` is an in-memory cluster of this process, for tests."""
    admin_url: str | None = field(default=None, kw_only=True)
    """URL of the admin interface, which tells before the first row whether the broker deduplicates
    the topic."""
    compression: Literal["none", "lz4", "zlib", "zstd", "snappy"] = field(
        default="lz4", kw_only=True
    )
    """Compression of entries of at least 4 KiB."""
    entry_messages_max: int = field(default=1_000, kw_only=True)
    """Most messages of an entry."""
    entry_bytes_max: int = field(default=MIB, kw_only=True)
    """Most bytes of an entry before compression; a larger message is an entry of its own."""
    pending_bytes_max: int = field(default=64 * MIB, kw_only=True)
    """Most bytes without a confirmation, over all topic partitions."""
    send_timeout_ms: int = field(default=30_000, kw_only=True)
    """Longest time until a message is confirmed, milliseconds."""
    linger_ms: int = field(default=5, kw_only=True)
    """Longest wait of ``send`` for more messages of an entry, milliseconds."""
    hashing_scheme: Literal["java", "murmur3"] = field(default="java", kw_only=True)
    """Hash that chooses the topic partition of a key. ``java`` is the default of Pulsar's
    clients."""

    delivery_guarantee: Literal["exactly-once", "at-least-once"] = field(
        default="exactly-once", kw_only=True
    )
    """Guarantee of ``write_batch``. ``at-least-once`` needs no deduplication and no ``sink_id``;
    a repeated call stores its rows again."""
    value_format: Literal["raw", "auto", "json", "avro", "protobuf"] = field(
        default="raw", kw_only=True
    )
    """Encoding of the rows of ``write_batch``. ``raw``: column ``value`` has the payload. ``auto``:
    the columns are encoded by the schema of the topic, if it has one. The others also require a
    schema of this type."""
    register_schema: bool = field(default=False, kw_only=True)
    """Whether ``write_batch`` registers a schema, made of the columns, for a topic without one. It
    is of the type ``value_format``; ``auto`` registers ``AVRO``, unless the only column is
    ``value``."""
    telemetry: bool = field(default=False, kw_only=True)
    """Whether ``send`` and ``write_batch`` make spans of OpenTelemetry, and ``send`` adds their
    context to the properties. Needs ``keyshard[otel]``."""
    metrics_port: int | None = field(default=None, kw_only=True)
    """Port that serves ``/metrics`` for Prometheus, ``/livez`` and ``/readyz`` while the sink is
    connected; ``None``: no server. 0 takes a free port, which the log names."""
    metrics_host: str = field(default="127.0.0.1", kw_only=True)
    """Address that this server binds. Use ``0.0.0.0`` or ``::`` if other machines must reach
    it."""

    def __repr__(self) -> str:
        return short_repr(self, always=("topic",))

    def __post_init__(self) -> None:
        topic = check_text("topic", self.topic, "Name the topic.")
        object.__setattr__(self, "topic", full_topic_name(topic.strip()))
        if self.sink_id is not None:
            name = check_text("sink_id", self.sink_id, "Name this sink.")
            if name.strip() != name or len(name) > SINK_ID_MAX:
                raise ConfigError(
                    f"sink_id is {shown(name)}; it must have at most {SINK_ID_MAX} characters, "
                    "and no space at its ends."
                )
        if self.connection is not None:
            set_shorthands(self, ("service_url", "admin_url"), self.connection)
        self.how_to_connect()
        check_choice("compression", self.compression, "none", "lz4", "zlib", "zstd", "snappy")
        check_choice("hashing_scheme", self.hashing_scheme, "java", "murmur3")
        check_choice("delivery_guarantee", self.delivery_guarantee, EXACTLY_ONCE, "at-least-once")
        check_choice("value_format", self.value_format, *VALUE_FORMATS)
        if not isinstance(self.register_schema, bool):
            raise ConfigError(f"register_schema is {shown(self.register_schema)}.", "Give a bool.")
        if self.register_schema and self.value_format not in ("auto", "avro", "json"):
            raise ConfigError(
                "register_schema needs the value_format 'auto', 'avro' or 'json': keyshard makes "
                "no other schemas of columns.",
                "Set one, or register the schema yourself.",
            )
        check_bool("telemetry", self.telemetry)
        if self.metrics_port is not None:
            check_integer("metrics_port", self.metrics_port, 0, 65_535)
        check_text("metrics_host", self.metrics_host, "Write an address, such as '0.0.0.0'.")
        for name, low, high in _LIMITS:
            check_integer(name, getattr(self, name), low, high)

    def how_to_connect(self) -> Connection:
        """Return the connection, or one made of the URLs."""
        return self.connection or Connection(self.service_url, self.admin_url)

    @property
    def place(self) -> str:
        """The sink, as errors name it."""
        name = "" if self.sink_id is None else f" {self.sink_id!r}"
        return f"sink{name} of {self.topic}"


def check_sink_of(run: str, sink: object, checkpoint: object) -> None:
    """Check the sink of a run, if one is given.

    Args:
        run: Name of the run in errors, such as ``run``.
        sink: The sink; ``None``: none is given.
        checkpoint: Checkpoint of the run; ``None`` for none.

    Raises:
        ConfigError: ``sink`` is not a sink, has a ``metrics_port``, or lacks the ``sink_id`` that a
            checkpoint needs.
    """
    if not isinstance(sink, SinkConfig | None):
        raise ConfigError(f"sink is {shown(sink)}.", "Give a keyshard.KeyShardSink.")
    if sink is not None and sink.metrics_port is not None:
        raise ConfigError(
            f"The sink of a {run} has a metrics_port, but its outputs are in the metrics of the "
            "source.",
            "Set metrics_port of the source instead.",
        )
    if sink is not None and checkpoint is not None and sink.sink_id is None:
        raise ConfigError(
            f"A {run} with a checkpoint publishes exactly once, and needs a sink_id, by which the "
            "broker recognises duplicates.",
            "Set it, such as KeyShardSink(..., sink_id='bills').",
        )


EXACTLY_ONCE = "exactly-once"
VALUE_FORMATS = ("raw", "auto", "json", "avro", "protobuf")
SINK_ID_MAX = 200
"""Longest sink id, characters."""
_LIMITS = (
    ("entry_messages_max", 1, 1_000_000),
    ("entry_bytes_max", 1_024, 128 * MIB),
    ("pending_bytes_max", MIB, 2**50),
    ("send_timeout_ms", 100, 3_600_000),
    ("linger_ms", 0, 60_000),
)
