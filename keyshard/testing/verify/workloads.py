"""Loads whose order, loss and duplicates can be checked from the messages alone.

They are published with pulsar-client, so that entries are those of Pulsar's own producers, such as
producer batches of mixed keys. Every value starts with ``key:seq:``, where ``seq`` counts the
messages of its key from 0.
"""

from __future__ import annotations

import itertools
import random
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import _pulsar
import pulsar

from keyshard.broker.admin.rest import PulsarAdmin
from keyshard.broker.auth.credentials import Credentials
from keyshard.broker.auth.errors import lacks
from keyshard.broker.client.connection import client_of
from keyshard.broker.client.log import close_client
from keyshard.broker.preflight import missing_topics
from keyshard.config.connection import Connection
from keyshard.core.option_checks import check_text
from keyshard.core.position.entry import full_topic_name
from keyshard.errors import BrokerError, BrokerUnavailableError, ConfigError

Batching = Literal["keyed", "none", "default"]
KeyKind = Literal["key", "ordering", "none"]

ENTRY_BYTES_MAX = 4_000_000
"""Most payload bytes of one entry; a broker refuses messages of 5 MiB and more."""

PARTITIONS_MAX = 10_000
"""Most partitions of a topic that is created."""

_KEYS_MAX = 10_000_000
_PARTITION_KEYS = 997
_DRAW = 4_096
_BATCH_MESSAGES = 1_000
_BATCH_BYTES = 128 * 1024
_BATCH_DELAY_MS = 50
# Runs are sent back to back, so each producer batch soon reaches its limit, and the delay ends only
# the last one. The delay is long, because a producer batch that it ends would split later runs.
_RUN_DELAY_MS = 1_000
_PENDING_MESSAGES = 20_000
_OPERATION_TIMEOUT_MS = 15_000
_SEND_TIMEOUT_MS = 60_000
_REPORT_EVERY = 1_000


@dataclass(frozen=True, slots=True)
class Workload:
    """Messages to publish; equal descriptions give the same messages in the same order."""

    messages: int
    """Number of messages."""
    keys: int
    """Number of different keys, ``k0`` and so on."""
    zipf: float | None = None
    """Exponent of a Zipf distribution over the keys, ``k0`` first; default: uniform."""
    size_bytes: int = 100
    """Length to which values are padded, bytes; a longer ``key:seq:`` stays whole. Default 100."""
    rate_per_s: float | None = None
    """Messages per second; default: as fast as the broker takes them."""
    batching: Batching = "keyed"
    """Producer batches: ``keyed``, of one key each; ``none``; ``default``, of mixed keys. Default
    ``keyed``."""
    entry_messages: int | None = None
    """Messages of one key per entry: published in runs of this length. Default: no runs."""
    key_kind: KeyKind = "key"
    """Keys are sent as partition key, as ordering key, or only in the value. Default key."""
    seed: int = 0
    """Seed of the choice of keys."""

    def __post_init__(self) -> None:
        _between("messages", self.messages, 1, 10**12)
        _between("keys", self.keys, 1, _KEYS_MAX)
        _between("size_bytes", self.size_bytes, 1, ENTRY_BYTES_MAX)
        if self.zipf is not None and not 0 < self.zipf <= 10:
            raise ConfigError(f"zipf is {self.zipf:g}; it must be above 0 and at most 10.")
        if self.rate_per_s is not None and not 0 < self.rate_per_s < float("inf"):
            raise ConfigError(f"rate_per_s is {self.rate_per_s:g}; it must be above 0.")
        _one_of("batching", self.batching, get_args(Batching))
        _one_of("key_kind", self.key_kind, get_args(KeyKind))
        if self.entry_messages is None:
            return
        _between("entry_messages", self.entry_messages, 1, 100_000)
        if self.batching == "none" and self.entry_messages > 1:
            raise ConfigError(
                f"entry_messages={self.entry_messages} needs batching.",
                "Set batching to 'keyed', or leave entry_messages out.",
            )
        if self.entry_messages * self.size_bytes > ENTRY_BYTES_MAX:
            raise ConfigError(
                f"entry_messages={self.entry_messages} of size_bytes={self.size_bytes} exceed the "
                f"limit of an entry, {ENTRY_BYTES_MAX} bytes.",
                "Lower one of them.",
            )

    @property
    def run_messages(self) -> int:
        """Length of the runs of one key in publish order."""
        return self.entry_messages or 1

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield the runs in publish order: number of the key, first sequence number, length."""
        following = [0] * self.keys
        left = self.messages
        for key in self._key_numbers():
            length = min(self.run_messages, left)
            yield key, following[key], length
            following[key] += length
            left -= length
            if not left:
                return

    def sequence(self) -> Iterator[tuple[str, int]]:
        """Yield key and sequence number of each message in publish order."""
        for key, first, length in self.runs():
            for seq in range(first, first + length):
                yield f"k{key}", seq

    def _key_numbers(self) -> Iterator[int]:
        chooser = random.Random(self.seed)
        if self.zipf is None:
            order = list(range(self.keys))
            chooser.shuffle(order)
            yield from itertools.cycle(order)
        else:
            exponent = self.zipf
            weights = itertools.accumulate(rank**-exponent for rank in range(1, self.keys + 1))
            bounds = list(weights)
            while True:
                yield from chooser.choices(range(self.keys), cum_weights=bounds, k=_DRAW)


@dataclass(frozen=True, slots=True)
class ProduceReport:
    """Figures of a published workload; the broker confirmed every message."""

    sent: int
    """Number of messages."""
    seconds: float
    """Time from the first message to the last confirmation, seconds."""
    per_key: dict[str, int] = field(repr=False)
    """Messages of each key that has any."""

    @property
    def rate_per_s(self) -> float:
        """Messages per second."""
        return self.sent / self.seconds if self.seconds > 0 else 0.0


def parse_value(value: bytes) -> tuple[str, int]:
    """Return key and sequence number of a value.

    Raises:
        ValueError: The value is not from a workload.
    """
    key, first, rest = value.partition(b":")
    seq, second, _ = rest.partition(b":")
    if not (key and first and second and seq.isdigit()):
        raise ValueError(f"{value[:40]!r} is not a value of a workload: it needs 'key:seq:'.")
    return key.decode(), int(seq)


def partition_key_of(key: str) -> str:
    """Return the partition key beside an ordering key: different, but always the same for a key."""
    return f"p{zlib.crc32(key.encode('ascii')) % _PARTITION_KEYS}"


def produce(
    workload: Workload,
    connection: Connection | str,
    topic: str,
    progress: Callable[[int], None] | None = None,
) -> ProduceReport:
    """Publish a workload and wait until the broker has confirmed every message.

    Args:
        workload: The messages to publish.
        connection: Connection to the cluster, or the URL of the broker.
        topic: Topic name, short or full; the broker creates a missing one without partitions.
        progress: Called from time to time with the number of further messages sent.

    Raises:
        BrokerUnavailableError: The broker cannot be reached or did not confirm in time.
        BrokerError: The broker refused a message; the error contains its first answer.
    """
    if isinstance(connection, str):
        connection = Connection(connection)
    connection = replace(connection, operation_timeout_ms=_OPERATION_TIMEOUT_MS)
    topic = full_topic_name(topic)
    answers: dict[Any, Any] = {}
    client = None
    try:
        with _hinted():
            missing_topics(connection, Credentials(connection), ())
        client = client_of(connection, io_threads=1)
        producer = client.create_producer(topic, **_producer_options(workload))
        started = time.monotonic()
        per_key = _send_all(workload, producer, answers, progress or (lambda _count: None))
        producer.flush()
        seconds = time.monotonic() - started
        producer.close()
    except pulsar.exceptions.PulsarException as exc:
        raise _translated(exc, connection, topic) from exc
    finally:
        if client is not None:
            close_client(client)
    _check(answers, topic)
    counts = {f"k{number}": count for number, count in enumerate(per_key) if count}
    return ProduceReport(sum(per_key), seconds, counts)


def create_partitioned_topic(connection: Connection | str, topic: str, partitions: int) -> bool:
    """Ensure that a partitioned topic exists with a number of partitions.

    Args:
        connection: Connection to the cluster, or the URL of its admin REST interface.
        topic: Topic name, short or full.
        partitions: Number of partitions, at least 1.

    Returns:
        Whether this call created it.

    Raises:
        ConfigError: A name or number is not possible.
        AdminError: It exists with another number, or the request was refused.
        BrokerUnavailableError: The interface cannot be reached.
    """
    _between("partitions", partitions, 1, PARTITIONS_MAX)
    check_text("topic", topic, "Name a topic.")
    if isinstance(connection, str):
        connection = Connection(admin_url=connection)
    with closing(PulsarAdmin(connection)) as admin, _hinted():
        return admin.create(topic, partitions)


def _producer_options(workload: Workload) -> dict[str, Any]:
    runs = workload.entry_messages
    kinds = {"keyed": pulsar.BatchingType.KeyBased, "default": pulsar.BatchingType.Default}
    return {
        "batching_enabled": workload.batching != "none",
        "batching_type": kinds.get(workload.batching, pulsar.BatchingType.Default),
        "batching_max_messages": runs or _BATCH_MESSAGES,
        "batching_max_allowed_size_in_bytes": (
            max(_BATCH_BYTES, runs * (workload.size_bytes + 256)) if runs else _BATCH_BYTES
        ),
        "batching_max_publish_delay_ms": _RUN_DELAY_MS if runs else _BATCH_DELAY_MS,
        "max_pending_messages": _PENDING_MESSAGES,
        "max_pending_messages_across_partitions": _PENDING_MESSAGES,
        "block_if_queue_full": True,
        "send_timeout_millis": _SEND_TIMEOUT_MS,
    }


def _send_all(
    workload: Workload, producer: Any, answers: dict[Any, Any], progress: Callable[[int], None]
) -> list[int]:
    """Send every message, and return the number of messages of each key.

    For speed, it uses the compiled builder and a callback in C instead of the client's Python
    wrappers. ``setdefault`` keeps the first message id of each kind of answer.
    """

    send, answer = producer._producer.send_async, answers.setdefault
    builder, size, kind = _pulsar.MessageBuilder, workload.size_bytes, workload.key_kind
    per_key = [0] * workload.keys
    pace = _Pace(workload.rate_per_s, time.monotonic())
    sent = reported = 0
    for number, first, length in workload.runs():
        key = f"k{number}"
        head = key.encode("ascii")
        partition_key = partition_key_of(key) if kind == "ordering" else key
        for seq in range(first, first + length):
            message = builder()
            message.content((b"%s:%d:" % (head, seq)).ljust(size, b"x"))
            if kind != "none":
                message.partition_key(partition_key)
                if kind == "ordering":
                    message.ordering_key(key)
            send(message.build(), answer)
        per_key[number] += length
        sent += length
        if sent - reported >= _REPORT_EVERY:
            progress(sent - reported)
            reported = sent
            if len(answers) > 1:
                break
        if pace.limited:
            pace.wait(sent)
    progress(sent - reported)
    return per_key


class _Pace:
    """Keeps a sender at a rate; it may catch up after a delay."""

    def __init__(self, rate_per_s: float | None, started: float) -> None:
        self.limited = rate_per_s is not None
        self._rate = rate_per_s or 0.0
        self._started = started

    def wait(self, sent: int) -> None:
        ahead_s = sent / self._rate - (time.monotonic() - self._started)
        if ahead_s > 0:
            time.sleep(ahead_s)


def _check(answers: dict[Any, Any], topic: str) -> None:
    failed = [result for result in answers if result != pulsar.Result.Ok]
    if failed:
        error = BrokerUnavailableError if failed[0] == pulsar.Result.Timeout else BrokerError
        raise error(
            f"Publishing to {topic} failed; the first failure was {failed[0].name}. Earlier "
            "messages may be stored.",
            "Use a new topic.",
            topic=topic,
        )


@contextmanager
def _hinted() -> Iterator[None]:
    """Add a hint to connection errors: a user who publishes a load may have no broker yet."""
    try:
        yield
    except BrokerUnavailableError as exc:
        hint = "'keyshard broker start' starts a broker on this machine."
        raise BrokerUnavailableError(exc.problem, f"{exc.remedy} {hint}".lstrip()) from exc


def _translated(exc: Exception, connection: Connection, topic: str) -> BrokerError:
    where = connection.service_url
    away = (pulsar.exceptions.ConnectError, pulsar.exceptions.Timeout)
    if isinstance(exc, away):
        return BrokerUnavailableError(
            f"The broker at {where} cannot be reached, or does not answer ({exc}).",
            "Check that it is running.",
        )
    if isinstance(exc, pulsar.exceptions.AuthorizationError):
        return lacks(Credentials(connection).who(), "produce", topic)
    return BrokerError(
        f"The broker at {where} refused a message to {topic}: {exc}.", "See its log.", topic=topic
    )


def _between(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value}; it must be from {low} to {high}.")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}.")
