"""Options of a source, validated on construction. Units are in the names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields
from typing import Literal

from keyshard.config.connection import (
    AUTO,
    SERVICE_URL,
    WIRE,
    Connection,
    Transport,
    set_shorthands,
)
from keyshard.config.field_types import given_fields, in_both, short_repr
from keyshard.config.workers import EMBEDDED, WorkersOption
from keyshard.core.metadata_columns import check_metadata_columns
from keyshard.core.option_checks import (
    check_bool,
    check_choice,
    check_integer,
    check_text,
    check_token,
    suggesting_options,
)
from keyshard.core.position.entry import full_topic_name
from keyshard.core.position.read_bounds import Edge, parse_start
from keyshard.core.ring.hash_range import RING_SIZE
from keyshard.core.topic_pattern import DEAD_LETTERS, TopicPattern
from keyshard.core.topic_segments import SCALABLE, SEGMENT, STARTING, check_scalable, is_scalable
from keyshard.errors import (
    ConfigError,
    CorruptEntryError,
    EncryptedMessageError,
    UnreadableEntryError,
)
from keyshard.notebook import table
from keyshard.redaction import listed, shown

MIB = 1024 * 1024
FAILFAST, PERMISSIVE, DROPMALFORMED = MODES = ("FAILFAST", "PERMISSIVE", "DROPMALFORMED")
"""Values of ``malformed``: a value that cannot be decoded is an error, becomes nulls beside its
bytes, or is left out with its row."""


@suggesting_options
@dataclass(frozen=True, repr=False)
class SourceConfig:
    """Configuration of one source; see ``docs/options.md`` for the Spark names."""

    topics: Sequence[str] = ()
    """Names of topics. A single string is one topic. ``topic://tenant/namespace/name`` is a
    scalable topic of Pulsar 5."""
    topics_pattern: str | None = field(default=None, kw_only=True)
    """Instead of names: ``persistent://tenant/namespace/regex``, or
    ``topic://tenant/namespace/regex`` for scalable topics. Needs ``admin_url``."""
    subscription: str = field(default=None, kw_only=True)  # type: ignore[assignment]
    """Subscription that holds the backlog. Only one source at a time may use it. Required
    wherever messages are acknowledged; bounded reads use none."""
    name: str | None = field(default=None, kw_only=True)
    """Name in the status, on the page and for the commands; ``None``: the subscription."""
    connection: Connection | None = field(default=None, kw_only=True)
    """Connection to the cluster, if two URLs are not enough: TLS, authentication, listener. It
    also sets ``service_url``, ``admin_url``, ``operation_timeout_ms`` and ``transport``."""
    service_url: str = field(default=SERVICE_URL, kw_only=True)
    """URL of the broker. ``memory://name`` is an in-memory cluster of this process, for tests."""
    admin_url: str | None = field(default=None, kw_only=True)
    """Admin REST interface, ``http://host:port``. Enables checks that the client cannot make.
    For an in-memory cluster, use the URL of the cluster."""
    transport: Transport = field(default=AUTO, kw_only=True)
    """Transport that consumes and reads: ``wire`` (keyshard's own), ``client`` (pulsar-client),
    or ``auto``, which is ``wire``."""
    parallelism: int = field(default=10, kw_only=True)
    """Number of hash ranges, independent of the number of topic partitions; 1 to 65,536."""
    starting_position: str = field(default="latest", kw_only=True)
    """Position at which a new subscription begins: ``earliest`` or ``latest``. With
    ``admin_url`` also a position per topic partition or segment as JSON,
    ``{"orders-partition-0": "7:120"}``, or a publish time with a zone,
    ``2026-11-21T08:00:00+01:00``. Ignored if the subscription exists at the first start."""
    batch_rows_max: int | None = field(default=None, kw_only=True)
    """Most rows of one batch; ``None``: what was received, up to half of the window."""
    batch_bytes_max: int | None = field(default=None, kw_only=True)
    """Most payload of one batch, bytes; ``None``: no limit."""
    batch_rows_min: int | None = field(default=None, kw_only=True)
    """Fewest rows of one batch. Ignored if ``batch_delay_max_ms`` has passed or the window is
    full."""
    batch_delay_max_ms: int = field(default=900_000, kw_only=True)
    """Longest wait for ``batch_rows_min`` since the previous batch, milliseconds."""
    batch_tasks: int | None = field(default=None, kw_only=True)
    """Number of layout partitions of a batch, and so of the host's tasks, up to the number of
    ranges; ``None``: as few as the rows are worth, by the time that the previous batch took."""
    on_misrouted: Literal["warn", "fail"] = field(default="warn", kw_only=True)
    """``warn`` or ``fail`` if a message is outside the range that received it. Then its producer
    does not batch by key, and the order of its keys is not kept."""
    on_corrupt: Literal["fail", "skip", "park"] = field(default="fail", kw_only=True)
    """Action for entries that cannot be read. ``fail``: the source ends with an error. ``skip``:
    acknowledge and count the entry, and leave it out. ``park`` (``source.run`` only): store the
    bytes of the entry as a rejected dead letter, then acknowledge it. ``skip`` and ``park`` need
    ``transport`` ``wire``: pulsar-client acknowledges such entries without reporting them."""
    on_encrypted: Literal["fail", "skip", "park"] = field(default="fail", kw_only=True)
    """Action for encrypted messages: ``fail``, ``skip`` or ``park``, as for ``on_corrupt``.
    ``skip`` and ``park`` need ``transport`` ``wire``: consumers of pulsar-client stop receiving
    after an encrypted batch."""
    window_rows_max: int = field(default=10_000_000, kw_only=True)
    """Most rows received and not committed, over all ranges and topic partitions. By default
    ``window_bytes_max`` and the broker's limits on unacknowledged messages are reached first."""
    window_bytes_max: int = field(default=256 * MIB, kw_only=True)
    """Most memory of those rows, bytes: values, keys, properties, and the overhead of each
    message, entry and delivery."""
    discovery_interval_ms: int = field(default=10_000, kw_only=True)
    """Interval between two checks for new topics and topic partitions, milliseconds."""
    workers: str = field(default="embedded", kw_only=True)
    """Place of the consumers. ``embedded``: this process. ``processes:4``: four processes of
    this machine, each receiving on its own core and replaced if it dies. ``ray:4``: four actors
    of a Ray cluster (``ray_adapter.workers``). Installed packages may add other backends. The
    number of concurrent handlers is ``workers`` of :meth:`KeyShardSource.run`."""
    worker_host: str = field(default="127.0.0.1", kw_only=True)
    """Address at which the host's tasks reach the process that holds the window."""
    metrics_port: int | None = field(default=None, kw_only=True)
    """Port that serves ``/metrics`` for Prometheus, ``/livez`` and ``/readyz`` while the source
    is consumed; ``None``: no server."""
    metrics_host: str = field(default="127.0.0.1", kw_only=True)
    """Address that this server binds. Use ``0.0.0.0`` or ``::`` if other machines must reach
    it."""
    ui_port: int | None = field(default=None, kw_only=True)
    """Port that serves the page of this source while it is consumed; ``None``: no page. Needs
    ``keyshard[ui]``."""
    ui_host: str = field(default="127.0.0.1", kw_only=True)
    """Address that the page binds. If other machines can reach it, ``ui_token`` is required."""
    ui_token: str | None = field(default=None, kw_only=True)
    """Token that a browser has to give, at least 16 characters; ``None``: none."""
    telemetry: bool = field(default=False, kw_only=True)
    """Whether handlers, batches, streams, Spark queries and Ray jobs make spans of OpenTelemetry.
    Needs ``keyshard[otel]``."""
    subscribe_timeout_ms: int = field(default=20_000, kw_only=True)
    """Longest wait for ranges that another consumer still holds, milliseconds."""
    operation_timeout_ms: int = field(default=30_000, kw_only=True)
    """Time limit of one request to the broker, milliseconds."""
    replay_timeout_ms: int = field(default=120_000, kw_only=True)
    """Longest time to replay a planned batch after a restart, milliseconds."""
    receiver_queue_size: int = field(default=1_000, kw_only=True)
    """Most messages that the client prefetches per range and topic partition. Reduced, to 1 at
    least, if all queues together would exceed half of ``window_bytes_max``."""
    receive_threads: int = field(default=4, kw_only=True)
    """Threads that receive, over all ranges and topic partitions."""
    acknowledge_timeout_ms: int = field(default=600_000, kw_only=True)
    """Longest time without a connected consumer to acknowledge through, or until a dead letter
    is confirmed, milliseconds."""
    settle_after_ms: int = field(default=300_000, kw_only=True)
    """Time after which an entry that was never delivered here counts as resolved, milliseconds.
    The broker must call it acknowledged for all that time. The broker writes cursors every 60 s,
    and a crash undoes later acknowledgements."""
    checkpoint_bytes_max: int = field(default=1024 * 1024, kw_only=True)
    """Size of a checkpoint at which the entries after gaps wait, bytes. Slow ranges and delayed
    messages make gaps: about one bit for each entry from the first gap to the last."""
    fail_on_data_loss: bool = field(default=True, kw_only=True)
    """Whether the source ends if data is gone, or was acknowledged by another application."""
    value_format: Literal["auto", "raw"] = field(default="auto", kw_only=True)
    """``auto``: if a topic has a schema, its fields are columns. ``raw``: rows have the bytes.
    Applies to Spark's rows; messages and record batches of Python always have the bytes."""
    metadata_columns: Sequence[str] = field(default=(), kw_only=True)
    """Additional columns of rows, by name; see ``docs/options.md``.
    Handlers get messages instead; for them only ``__keyBytes`` counts, as ``message.key_bytes``."""
    malformed: Literal["FAILFAST", "PERMISSIVE", "DROPMALFORMED"] = field(
        default="FAILFAST", kw_only=True
    )
    """Action for values that do not fit the schema of their topic. ``FAILFAST``: an error.
    ``PERMISSIVE``: nulls beside the bytes. ``DROPMALFORMED``: no row."""
    available_now_timeout_ms: int = field(default=600_000, kw_only=True)
    """Longest wait of a bounded run for a row, or for proof that none comes, milliseconds."""
    available_now_quiet_ms: int = field(default=5_000, kw_only=True)
    """Without ``admin_url``: silence after which entries that a bounded run misses count as
    acknowledged before it began, milliseconds."""
    shorthands_of: InitVar[Connection | None] = field(default=None, kw_only=True)
    """Internal: the connection that set the shorthands, passed on by ``dataclasses.replace``."""

    def __repr__(self) -> str:
        return short_repr(self, never=self._unshown)

    def _repr_html_(self) -> str:
        return table(type(self).__name__, given_fields(self, never=self._unshown))

    @property
    def _unshown(self) -> tuple[str, ...]:
        # The repr of the connection shows the shorthands already.
        return (*(() if self.connection is None else SHORTHANDS), "ui_token")

    def __post_init__(self, shorthands_of: Connection | None) -> None:
        object.__setattr__(self, "topics", _topic_names(self.topics))
        self._connect(shorthands_of)
        self._check_pattern()
        self._check_subscription()
        start = parse_start("starting_position", self.starting_position)
        if not isinstance(start, Edge) and self.admin_url is None:
            raise ConfigError(
                f"starting_position is {shown(self.starting_position)}, which needs the admin "
                "interface.",
                "Set admin_url, or begin at 'earliest'.",
            )
        check_choice("on_misrouted", self.on_misrouted, "warn", "fail")
        check_choice("value_format", self.value_format, "auto", "raw")
        check_choice("malformed", self.malformed, *MODES)
        metadata = check_metadata_columns(
            "metadata_columns", self.metadata_columns, by_client=self.how_to_connect().by_client
        )
        object.__setattr__(self, "metadata_columns", metadata)
        self._check_unreadable()
        check_text("ui_host", self.ui_host, "Write an address, such as '0.0.0.0'.")
        if self.ui_token is not None:
            check_token("ui_token", self.ui_token)
        if self.name is not None:
            check_text("name", self.name, "Write a name, or None for the subscription.")
        check_text(
            "worker_host", self.worker_host, "Write an address that the executors can reach."
        )
        check_text("metrics_host", self.metrics_host, "Write an address, such as '0.0.0.0'.")
        check_bool("fail_on_data_loss", self.fail_on_data_loss)
        check_bool("telemetry", self.telemetry)
        self._check_numbers()
        self._check_workers()
        self._check_scalable()
        if (
            self.batch_rows_min
            and self.batch_rows_max
            and self.batch_rows_min > self.batch_rows_max
        ):
            raise ConfigError(
                f"batch_rows_min is {self.batch_rows_min}, more than the limit of a batch, "
                f"{self.batch_rows_max}.",
                "Lower batch_rows_min.",
            )

    def _connect(self, before: Connection | None) -> None:
        """Set the shorthands from the connection; without one, check them.

        The shorthands are the options that a source shares with its connection, such as
        ``service_url``; see :data:`SHORTHANDS`.

        Args:
            before: The connection that set the shorthands of the original, if this source is a
                copy. No user wrote these values, so they do not contradict another connection.
        """
        made = self.connection
        object.__setattr__(self, "shorthands_of", made)
        if made is None:
            self.how_to_connect()
        else:
            set_shorthands(self, SHORTHANDS, made, before)

    def _check_subscription(self) -> None:
        """Check the name of the subscription. Bounded reads have none."""
        if self.subscription is not None:
            name = check_text("subscription", self.subscription, _SUBSCRIPTION)
            if name.strip() != name:
                raise ConfigError(f"subscription is {shown(name)}.", _SUBSCRIPTION)

    def check_subscribed(self) -> None:
        """Check that a subscription is named.

        Raises:
            ConfigError: No subscription is named.
        """
        if self.subscription is None:
            raise ConfigError(
                "subscription is missing. It holds the backlog, and messages are acknowledged on "
                "it.",
                "Name a subscription that no other application uses, such as KeyShardSource(..., "
                "subscription='billing'). Only bounded reads need no subscription.",
            )

    def how_to_connect(self) -> Connection:
        """Return the connection, or one made from the shorthands."""
        if self.connection is not None:
            return self.connection
        return Connection(
            self.service_url,
            self.admin_url,
            operation_timeout_ms=self.operation_timeout_ms,
            transport=self.transport,
        )

    @property
    def default_dead_letter_topics(self) -> tuple[str, ...]:
        """Default dead-letter topics: one per topic, or one for a pattern.

        New dead letters go to the first, unless another one has dead letters already.
        """
        # A subscription's name may have characters that a topic's name may not.
        own = re.sub(r"[^\w.=-]", "-", self.subscription)
        if self.topics_pattern is None:
            names = [topic.replace(SCALABLE, "persistent://", 1) for topic in self.topics]
            return tuple(f"{name}-{own}{DEAD_LETTERS}" for name in names)
        pattern = TopicPattern.parse(self.topics_pattern)
        return (f"persistent://{pattern.tenant}/{pattern.namespace}/{own}{DEAD_LETTERS}",)

    @property
    def place(self) -> str:
        """The source, as errors name it."""
        of = f", subscription {self.subscription!r}" if self.subscription else ""
        return f"source of {self.topics_pattern or listed(self.topics)}{of}"

    @property
    def in_memory(self) -> bool:
        """Whether the broker is an in-memory cluster of this process."""
        return self.how_to_connect().in_memory

    def _check_pattern(self) -> None:
        """Check that either topics or a pattern is given, and complete the pattern."""
        if self.topics_pattern is None:
            if not self.topics:
                raise ConfigError("No topic is given.", "Set topic, topics or topics_pattern.")
            return
        if self.topics:
            raise ConfigError("topics_pattern and topics are both given.", "Give only one of them.")
        pattern = check_text("topics_pattern", self.topics_pattern, "Write tenant/namespace/regex.")
        object.__setattr__(self, "topics_pattern", TopicPattern.parse(pattern).text)
        if self.admin_url is None:
            raise ConfigError(
                "topics_pattern needs the admin interface, which lists topics.",
                "Set admin_url, or name the topics.",
            )

    @property
    def skipped(self) -> tuple[type[UnreadableEntryError], ...]:
        """Kinds of unreadable entries that are acknowledged and left out."""
        return self._unreadable("skip")

    @property
    def parked(self) -> tuple[type[UnreadableEntryError], ...]:
        """Kinds of unreadable entries that become dead letters."""
        return self._unreadable("park")

    def _unreadable(self, choice: str) -> tuple[type[UnreadableEntryError], ...]:
        return tuple(kind for name, kind in UNREADABLE.items() if getattr(self, name) == choice)

    def _check_unreadable(self) -> None:
        for name in UNREADABLE:
            choice = getattr(self, name)
            check_choice(name, choice, "fail", "skip", "park")
            if choice != "fail" and self.how_to_connect().by_client:
                raise ConfigError(
                    f"{name} is {choice!r}, but transport is 'client': {_BY_CLIENT[name]}.",
                    f"Set transport to {WIRE!r}, or leave {name} out.",
                )

    def _check_workers(self) -> None:
        """Check that the kind of workers exists, and that they can reach the broker."""
        if self.parsed_workers() is not None and self.in_memory:
            raise ConfigError(
                f"workers is {shown(self.workers)}, but only this process can reach the in-memory "
                "cluster.",
                f"Set workers to {EMBEDDED!r}.",
            )

    @property
    def is_scalable(self) -> bool:
        """Whether it consumes scalable topics."""
        return any(map(is_scalable, [*self.topics, self.topics_pattern or ""]))

    def _check_scalable(self) -> None:
        """Check that nothing is requested which cannot be had of a scalable topic."""
        if not self.is_scalable:
            return
        if not all(map(is_scalable, self.topics)):
            raise ConfigError(
                "A source cannot have scalable topics and persistent topics.",
                "Make a source for each kind.",
            )
        if self.admin_url is None:
            raise ConfigError(
                "A scalable topic needs the admin interface. keyshard registers the subscription "
                "there, or the broker deletes segments that it has not acknowledged.",
                "Set admin_url.",
            )
        if self.how_to_connect().by_client:
            raise ConfigError(
                f"transport is {shown(self.transport)}, which cannot be combined with a scalable "
                "topic.",
                f"Set transport to {WIRE!r}, or name persistent topics.",
            )
        if self.subscription is not None and self.subscription.endswith(STARTING):
            raise ConfigError(
                f"subscription is {shown(self.subscription)}, and keyshard deletes subscriptions "
                f"of scalable topics whose names end with {STARTING!r}.",
                "Choose another name.",
            )

    def parsed_workers(self) -> WorkersOption | None:
        """Return the workers that host the consumers; ``None``: this process."""
        return WorkersOption.parse(self.workers)

    def _check_numbers(self) -> None:
        for name, low, high in _LIMITS:
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            check_integer(name, value, low, high)


def _topic_names(topics: object) -> tuple[str, ...]:
    """Return the full names of topics, without duplicates."""
    if isinstance(topics, str):
        topics = [topics]
    if isinstance(topics, (bytes, bytearray, Mapping)) or not isinstance(topics, Iterable):
        raise ConfigError(
            f"topics is {shown(topics)}.", "Write the name of a topic, or a list of names."
        )
    names = [check_text("topics", name, "Write names of topics.") for name in topics]
    return tuple(dict.fromkeys(_full_name(name.strip()) for name in names))


def _full_name(name: str) -> str:
    # Brokers take schemes in any case; keyshard takes them as the broker writes them.
    if name.lower().startswith((SCALABLE, SEGMENT)):
        return check_scalable(name)
    return full_topic_name(name)


UNREADABLE: Mapping[str, type[UnreadableEntryError]] = {
    "on_corrupt": CorruptEntryError,
    "on_encrypted": EncryptedMessageError,
}
"""Options for unreadable entries, and the kind of entry of each."""
_BY_CLIENT = {
    "on_corrupt": "pulsar-client acknowledges unreadable entries without an error",
    "on_encrypted": (
        "pulsar-client returns one permit for an encrypted batch of many messages, so its "
        "consumers would stall"
    ),
}
SHORTHANDS = in_both(Connection, SourceConfig)
"""Fields that a source shares with its connection."""
_SUBSCRIPTION = "Name the Pulsar subscription that holds the backlog of this source."
_OPTIONAL = {one.name for one in fields(SourceConfig) if one.default is None}
_LIMITS = (
    ("parallelism", 1, RING_SIZE),
    ("batch_rows_max", 1, 10**9),
    ("metrics_port", 0, 65_535),
    ("ui_port", 0, 65_535),
    ("batch_bytes_max", 1, 2**50),
    ("batch_rows_min", 1, 10**9),
    ("batch_delay_max_ms", 0, 86_400_000),
    ("batch_tasks", 1, RING_SIZE),
    ("window_rows_max", 2, 10**9),
    ("window_bytes_max", MIB, 2**50),
    ("discovery_interval_ms", 10, 86_400_000),
    ("subscribe_timeout_ms", 1, 3_600_000),
    ("replay_timeout_ms", 1, 3_600_000),
    ("receiver_queue_size", 1, 100_000),
    ("receive_threads", 1, 256),
    ("acknowledge_timeout_ms", 1_000, 86_400_000),
    ("settle_after_ms", 1, 86_400_000),
    ("checkpoint_bytes_max", 4_096, 2**30),
    ("available_now_timeout_ms", 1, 86_400_000),
    ("available_now_quiet_ms", 1, 3_600_000),
)
