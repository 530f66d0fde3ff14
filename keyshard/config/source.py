"""Everything that can be configured, validated on construction, with the unit in the name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields
from typing import Literal

from keyshard.config.connection import AUTO, SERVICE_URL, WIRE, Connection, Transport
from keyshard.config.field_types import in_both, short_repr
from keyshard.config.workers import EMBEDDED, Workers
from keyshard.core.metadata_columns import check_metadata_columns
from keyshard.core.option_checks import (
    check_bool,
    check_choice,
    check_integer,
    check_text,
    suggesting_options,
)
from keyshard.core.position.bounds import Edge, parse_start
from keyshard.core.position.entry import full_topic_name
from keyshard.core.ring.hash_range import RING_SIZE
from keyshard.core.topic_pattern import DEAD_LETTERS, TopicPattern
from keyshard.errors import (
    ConfigError,
    CorruptEntryError,
    EncryptedMessageError,
    UnreadableEntryError,
)
from keyshard.redaction import shown

MIB = 1024 * 1024


@suggesting_options
@dataclass(frozen=True, repr=False)
class SourceConfig:
    """Configuration of one source; see ``docs/options.md`` for the Spark names."""

    topics: Sequence[str] = ()
    """Topic names, one or several; a single string is one topic."""
    topics_pattern: str | None = field(default=None, kw_only=True)
    """Instead of names: ``persistent://tenant/namespace/regex``; needs ``admin_url``."""
    subscription: str = field(default=None, kw_only=True)  # type: ignore[assignment]
    """Subscription that holds the backlog; one source at a time may use it. Required where messages
    are acknowledged (then it is a text); bounded reads use none."""
    connection: Connection | None = field(default=None, kw_only=True)
    """How the cluster is reached, where two URLs do not say it: TLS, authentication, listener; then
    it says ``service_url``, ``admin_url``, ``operation_timeout_ms`` and ``transport`` as well."""
    service_url: str = field(default=SERVICE_URL, kw_only=True)
    """Where the broker is; ``memory://name`` is an in-memory cluster of this process, for tests."""
    admin_url: str | None = field(default=None, kw_only=True)
    """Admin REST interface, ``http://host:port``; enables checks that the client cannot make. That
    of an in-memory cluster has the same URL as the cluster."""
    transport: Transport = field(default=AUTO, kw_only=True)
    """``auto``, ``wire`` or ``client``: whether keyshard itself consumes and reads, which ``auto``
    is, or pulsar-client."""
    parallelism: int = field(default=10, kw_only=True)
    """Number of hash ranges, whatever the number of topic partitions; 1 to 65,536."""
    starting_position: str = field(default="latest", kw_only=True)
    """``earliest`` or ``latest``; or, with ``admin_url``, a position for each topic partition as
    JSON, ``{"orders-partition-0": "7:120"}``, or a publish time with its zone,
    ``2026-11-21T08:00:00+01:00``. Concerns only subscriptions that do not exist at first start."""
    batch_rows_max: int | None = field(default=None, kw_only=True)
    """Most rows of one batch; ``None``: half of ``window_rows_max``."""
    batch_bytes_max: int | None = field(default=None, kw_only=True)
    """Most payload of one batch, bytes; ``None``: no limit of its own."""
    batch_rows_min: int | None = field(default=None, kw_only=True)
    """Fewest rows of one batch, unless ``batch_delay_max_ms`` has passed or the window is full."""
    batch_delay_max_ms: int = field(default=900_000, kw_only=True)
    """Longest wait for ``batch_rows_min`` since the batch before, milliseconds."""
    on_misrouted: Literal["warn", "fail"] = field(default="warn", kw_only=True)
    """``warn`` or ``fail`` on messages outside the range that received them: their producer batches
    by default instead of by key, so the order of their keys is not kept."""
    on_corrupt: Literal["fail", "skip", "park"] = field(default="fail", kw_only=True)
    """Handling of entries that cannot be read. ``fail``: the source ends with an error.
    ``skip``: they are acknowledged, counted and left out. ``park`` (``source.run`` only): what is
    stored of each becomes a rejected dead letter, then the entry is acknowledged. ``skip`` and
    ``park`` need ``transport`` ``wire``: pulsar-client acknowledges such entries and tells
    nobody."""
    on_encrypted: Literal["fail", "skip", "park"] = field(default="fail", kw_only=True)
    """The same of encrypted messages: ``fail``, ``skip`` or ``park``. ``skip`` and ``park`` need
    ``transport`` ``wire``: consumers of pulsar-client stop receiving behind encrypted batches."""
    window_rows_max: int = field(default=200_000, kw_only=True)
    """Most rows received and not yet committed, over all ranges and topic partitions."""
    window_bytes_max: int = field(default=256 * MIB, kw_only=True)
    """Most memory of those rows, bytes: values, keys, properties, and what each message, entry and
    delivery takes beside them."""
    discovery_interval_ms: int = field(default=10_000, kw_only=True)
    """Time between two looks for new topics and topic partitions, milliseconds."""
    workers: str = field(default="embedded", kw_only=True)
    """What has the consumers: ``embedded``, this process; ``processes:4``, so many processes of
    this machine, each a core for receiving, and started again when one dies; ``ray:4``, so many
    actors of a Ray cluster (``ray_adapter.workers``); or another place that is installed. How many
    handlers run at the same time is ``workers`` of :meth:`KeyShardSource.run`."""
    worker_host: str = field(default="127.0.0.1", kw_only=True)
    """Address under which the host's tasks reach the process that holds the window."""
    subscribe_timeout_ms: int = field(default=20_000, kw_only=True)
    """Longest wait for ranges that somebody else still holds, milliseconds."""
    operation_timeout_ms: int = field(default=30_000, kw_only=True)
    """Longest time of one request to the broker, milliseconds."""
    replay_timeout_ms: int = field(default=120_000, kw_only=True)
    """Longest time to read a planned batch again after a restart, milliseconds."""
    receiver_queue_size: int = field(default=1_000, kw_only=True)
    """Most messages the client asks for ahead, per range and topic partition; fewer where all of
    them together would take more than half of ``window_bytes_max``, but at least one."""
    receive_threads: int = field(default=4, kw_only=True)
    """Threads that receive, over all ranges and topic partitions."""
    acknowledge_timeout_ms: int = field(default=600_000, kw_only=True)
    """Longest time without a connected consumer to acknowledge through, or until a dead letter is
    confirmed, milliseconds."""
    settle_after_ms: int = field(default=300_000, kw_only=True)
    """How long the broker must call an entry acknowledged that was never delivered here before it
    counts as settled, milliseconds. The broker writes cursors every 60 s, and a crash undoes the
    rest."""
    checkpoint_bytes_max: int = field(default=256 * 1024, kw_only=True)
    """Size of a checkpoint at which fast ranges wait for slow ones, bytes."""
    fail_on_data_loss: bool = field(default=True, kw_only=True)
    """Whether data that is gone, or was acknowledged by somebody else, ends the source."""
    value_format: Literal["auto", "raw"] = field(default="auto", kw_only=True)
    """``auto`` or ``raw``: whether rows have the fields of the schema of their topic as columns,
    where it has one, or the bytes. Of Spark's rows; messages and record batches of Python have the
    bytes."""
    metadata_columns: Sequence[str] = field(default=(), kw_only=True)
    """Columns that rows have beside the default ones, one or several: ``__orderingKey``,
    ``__keyBytes``, ``__sequenceId``, ``__producer``, ``__brokerPublishTime`` or
    ``__messageIdBytes``; see ``docs/options.md``. Handlers have messages, and of these
    ``__keyBytes``, as ``message.key_bytes``."""
    malformed: Literal["FAILFAST", "PERMISSIVE", "DROPMALFORMED"] = field(
        default="FAILFAST", kw_only=True
    )
    """``FAILFAST``, ``PERMISSIVE`` or ``DROPMALFORMED`` on values that the schema of their topic
    does not fit: an error, nulls beside the bytes, or no row."""
    available_now_timeout_ms: int = field(default=600_000, kw_only=True)
    """Longest wait of a bounded run for a row, or for the proof that none comes, milliseconds."""
    available_now_quiet_ms: int = field(default=5_000, kw_only=True)
    """Silence after which, without admin_url, what a bounded run misses counts as acknowledged
    before it began, milliseconds."""
    shorthands_of: InitVar[Connection | None] = field(default=None, kw_only=True)
    """Not to be given: whose shorthands these are, which ``dataclasses.replace`` hands on."""

    def __repr__(self) -> str:
        # The connection has a ``repr`` of its own.
        never = () if self.connection is None else SHORTHANDS
        return short_repr(self, never=never)

    def __post_init__(self, shorthands_of: Connection | None) -> None:
        object.__setattr__(self, "topics", _topic_names(self.topics))
        self._connect(shorthands_of)
        self._check_pattern()
        self._check_subscription()
        start = parse_start("starting_position", self.starting_position)
        if not isinstance(start, Edge) and self.admin_url is None:
            raise ConfigError(
                f"starting_position is {shown(self.starting_position)}, and only the admin REST "
                "interface begins a subscription there. Set admin_url, or begin at 'earliest'."
            )
        check_choice("on_misrouted", self.on_misrouted, "warn", "fail")
        check_choice("value_format", self.value_format, "auto", "raw")
        check_choice("malformed", self.malformed, "FAILFAST", "PERMISSIVE", "DROPMALFORMED")
        metadata = check_metadata_columns(
            "metadata_columns", self.metadata_columns, by_client=self.how_to_connect().by_client
        )
        object.__setattr__(self, "metadata_columns", metadata)
        self._check_unreadable()
        check_text("worker_host", self.worker_host, "name the address the tasks can reach")
        check_bool("fail_on_data_loss", self.fail_on_data_loss)
        self._check_numbers()
        self._check_workers()
        if (
            self.batch_rows_min
            and self.batch_rows_max
            and self.batch_rows_min > self.batch_rows_max
        ):
            raise ConfigError(
                f"batch_rows_min is {self.batch_rows_min}, above the most rows of a batch: "
                f"{self.batch_rows_max}."
            )

    def _connect(self, before: Connection | None) -> None:
        """The shorthands make a connection, or a connection says them.

        Args:
            before: The connection that said them in the source that this one is made of. Such a
                shorthand was not written by anybody, so it contradicts no other connection.
        """
        made = self.connection
        object.__setattr__(self, "shorthands_of", made)
        if made is None:
            self.how_to_connect()
            return
        if not isinstance(made, Connection):
            raise ConfigError(f"connection is {shown(made)}; give a keyshard.Connection.")
        for name in SHORTHANDS:
            own, said = getattr(self, name), getattr(made, name)
            unsaid = [type(self).__dataclass_fields__[name].default]
            if isinstance(before, Connection):
                unsaid.append(getattr(before, name))
            if own not in (said, *unsaid):
                raise ConfigError(
                    f"{name} is given together with a connection that says another one. Give it in "
                    "the connection."
                )
            object.__setattr__(self, name, said)

    def _check_subscription(self) -> None:
        """Check the name of the subscription. Bounded reads have none."""
        if self.subscription is not None:
            name = check_text("subscription", self.subscription, _SUBSCRIPTION)
            if name.strip() != name:
                raise ConfigError(f"subscription is {shown(name)}; {_SUBSCRIPTION}.")

    def check_subscribed(self) -> None:
        """Check that a subscription is named.

        Raises:
            ConfigError: None is.
        """
        if self.subscription is None:
            raise ConfigError(
                "subscription is missing: messages are acknowledged on it, and it holds the "
                "backlog. Name one that no other application uses, as in "
                "KeyShardSource(..., subscription='billing'). Only bounded reads need none."
            )

    def how_to_connect(self) -> Connection:
        """The connection, or what the shorthands make of it."""
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
        """Where letters go unless another topic is named: to the first, or where some rest."""
        # A subscription may have a name that a topic may not.
        own = re.sub(r"[^\w.=-]", "-", self.subscription)
        if self.topics_pattern is None:
            return tuple(f"{topic}-{own}{DEAD_LETTERS}" for topic in self.topics)
        pattern = TopicPattern.parse(self.topics_pattern)
        return (f"persistent://{pattern.tenant}/{pattern.namespace}/{own}{DEAD_LETTERS}",)

    @property
    def in_memory(self) -> bool:
        """Whether the broker is an in-memory cluster of this process."""
        return self.how_to_connect().in_memory

    def _check_pattern(self) -> None:
        """Exactly one of topics and topics_pattern; the pattern is completed."""
        if self.topics_pattern is None:
            if not self.topics:
                raise ConfigError(
                    "No topic is given. Name at least one in 'topic' or 'topics', or give a "
                    "pattern of topics."
                )
            return
        if self.topics:
            raise ConfigError("topics_pattern is given together with topics. Give only one.")
        pattern = check_text("topics_pattern", self.topics_pattern, "write tenant/namespace/regex")
        object.__setattr__(self, "topics_pattern", TopicPattern.parse(pattern).text)
        if self.admin_url is None:
            raise ConfigError(
                "topics_pattern needs the admin REST interface, which lists topics. Set admin_url, "
                "or name the topics."
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
                    f"{name} is {choice!r}, and transport is 'client': {_BY_CLIENT[name]}. Use "
                    f"transport={WIRE!r}, or leave {name} out."
                )

    def _check_workers(self) -> None:
        """Workers are of a kind that there is, and can reach the broker."""
        if self.hosting() is not None and self.in_memory:
            raise ConfigError(
                f"workers is {shown(self.workers)}, and the broker is an in-memory cluster of this "
                f"process, which no other process reaches. Use workers={EMBEDDED!r}."
            )

    def hosting(self) -> Workers | None:
        """Where the consumers are; ``None``: in this process."""
        return Workers.parse(self.workers)

    def _check_numbers(self) -> None:
        for name, low, high in _LIMITS:
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            check_integer(name, value, low, high)


def _topic_names(topics: object) -> tuple[str, ...]:
    """Full names of topics, each once: of one name or of several."""
    if isinstance(topics, str):
        topics = [topics]
    if isinstance(topics, (bytes, bytearray, Mapping)) or not isinstance(topics, Iterable):
        raise ConfigError(f"topics is {shown(topics)}; give the name of a topic or a list of them.")
    names = [check_text("topics", name, "give names of topics") for name in topics]
    return tuple(dict.fromkeys(full_topic_name(name.strip()) for name in names))


UNREADABLE: Mapping[str, type[UnreadableEntryError]] = {
    "on_corrupt": CorruptEntryError,
    "on_encrypted": EncryptedMessageError,
}
"""Options for unreadable entries, and the kind of entry that each is about."""
_BY_CLIENT = {
    "on_corrupt": "pulsar-client acknowledges entries that it cannot read, and tells nobody",
    "on_encrypted": (
        "pulsar-client returns one permit for an encrypted batch of many messages, so that its "
        "consumers would stop receiving"
    ),
}
SHORTHANDS = in_both(Connection, SourceConfig)
"""Fields of a source that its connection has, too."""
_SUBSCRIPTION = "name the Pulsar subscription that holds the backlog of this source"
_OPTIONAL = {one.name for one in fields(SourceConfig) if one.default is None}
_LIMITS = (
    ("parallelism", 1, RING_SIZE),
    ("batch_rows_max", 1, 10**9),
    ("batch_bytes_max", 1, 2**50),
    ("batch_rows_min", 1, 10**9),
    ("batch_delay_max_ms", 0, 86_400_000),
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
