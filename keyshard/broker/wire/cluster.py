"""The brokers of a cluster: which one has a topic, and one connection to each."""

from __future__ import annotations

import threading
import time
from typing import Any
from urllib.parse import urlsplit

from keyshard.broker.pulsar.credentials import Credentials
from keyshard.broker.wire.connection import WireConnection
from keyshard.broker.wire.dialling import Address
from keyshard.broker.wire.errors import RefusedError
from keyshard.broker.wire.frames import api
from keyshard.config.connection import Connection
from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import BrokerError, BrokerUnavailableError

REDIRECTS_MAX = 20
"""Brokers that may name another one for a topic before they are taken to go round in a circle."""
PARTITIONS_MAX = 1_000_000
"""Partitions of one topic; more are no answer."""
_REDIRECT, _CONNECT = 0, 1
_SCHEMA_TYPES = dict(enumerate((
    "NONE", "STRING", "JSON", "PROTOBUF", "AVRO", "BOOLEAN", "INT8", "INT16", "INT32", "INT64",
    "FLOAT", "DOUBLE", "DATE", "TIME", "TIMESTAMP", "KEY_VALUE", "INSTANT", "LOCAL_DATE",
    "LOCAL_TIME", "LOCAL_DATE_TIME", "PROTOBUF_NATIVE",
)))  # fmt: skip
_NOT_READY = 6


class Cluster:
    """Looks topics up, and keeps connections.

    Args:
        connection: How the cluster is reached.
        credentials: Those of the connection.
    """

    def __init__(self, connection: Connection, credentials: Credentials) -> None:
        self._connection = connection
        self._credentials = credentials
        self._hosts = [_address(host, tls=connection.tls) for host in connection.hosts]
        self._lock = threading.Lock()
        self._open: dict[Address, WireConnection] = {}
        self._opening: dict[Address, threading.Lock] = {}
        self._closed = False

    def partitions(self, topic: str, timeout_s: float) -> int:
        """Partitions of a topic; 0 for one that is not partitioned.

        Raises:
            BrokerUnavailableError: No answer in time (retriable).
            RefusedError: The broker refuses.
        """
        end_s = time.monotonic() + timeout_s
        asked = api.PartitionedMetadata(topic=topic.encode())
        service = self._service(end_s)
        count = int(service.ask("partitioned_metadata", asked, _left(end_s)).partitions)
        if count > PARTITIONS_MAX:
            raise BrokerUnavailableError(
                f"The broker at {service.address} says that {topic} has {count} partitions, which "
                "cannot be. Check that service_url is that of a Pulsar broker."
            )
        return count

    def schema(self, topic: str, version: int | None, timeout_s: float) -> TopicSchema:
        """A version of the schema of a topic; the newest where none is named.

        Raises:
            BrokerUnavailableError: No answer in time (retriable).
            RefusedError: The broker refuses, or has none.
        """
        end_s = time.monotonic() + timeout_s
        asked = api.GetSchema(topic=topic.encode())
        if version is not None:
            asked.version = version.to_bytes(8, "big")
        found = self._service(end_s).ask("get_schema", asked, _left(end_s))
        number, told = found.schema.type, found.schema
        return TopicSchema(
            _SCHEMA_TYPES.get(number, f"number {number}"),
            told.data,
            int.from_bytes(found.version, "big"),
            {_text(one.key): _text(one.value) for one in told.properties},
        )

    def owner(self, topic: str, timeout_s: float) -> WireConnection:
        """A connection to the broker that has a topic partition.

        Raises:
            BrokerUnavailableError: No answer in time (retriable).
            RefusedError: The broker refuses.
        """
        end_s = time.monotonic() + timeout_s
        asked = self._service(end_s)
        authoritative = False
        for _ in range(REDIRECTS_MAX):
            found = self._look_up(asked, topic, authoritative, end_s)
            target = self._target(found, asked)
            if found.response == _CONNECT:
                return self._connect(target, end_s)
            asked, authoritative = self._connect(target, end_s), found.authoritative
        raise BrokerUnavailableError(
            f"The brokers name one another as the owner of {topic}, {REDIRECTS_MAX} times. Check "
            "that the cluster is well."
        )

    def _look_up(self, asked: WireConnection, topic: str, authoritative: bool, end_s: float) -> Any:
        question = api.Lookup(topic=topic.encode(), authoritative=authoritative)
        if self._connection.listener_name is not None:
            question.listener_name = self._connection.listener_name.encode()
        try:
            found = asked.ask("lookup", question, _left(end_s))
        except RefusedError as exc:
            if exc.code != _NOT_READY or not question.HasField("listener_name"):
                raise
            raise BrokerUnavailableError(
                f"{topic} cannot be reached: {exc.said}.{self._listener_hint()}"
            ) from exc
        if found.response not in (_REDIRECT, _CONNECT):
            raise RefusedError(found.error, found.message)
        return found

    def _target(self, found: Any, asked: WireConnection) -> Address:
        tls = self._connection.tls
        url = (found.broker_url_tls if tls else found.broker_url).decode(errors="replace")
        if not url:
            raise BrokerUnavailableError(
                f"The broker at {asked.address} names no address {'with' if tls else 'without'} "
                f"TLS.{self._listener_hint()}"
            )
        try:
            target = _address(url.partition("://")[2].rstrip("/"), tls=tls)
            named = bool(target.host.encode("idna")) and "\0" not in target.host
        except ValueError:
            named = False
        if not named:
            raise BrokerUnavailableError(
                f"The broker at {asked.address} names {url[:100]!r} as the one that has the topic, "
                "which is no address. Check its advertised address."
            )
        if found.through_proxy:
            proxy = asked.address
            return Address(proxy.host, proxy.port, target.authority)
        return target

    def _listener_hint(self) -> str:
        listener = self._connection.listener_name
        if listener is None:
            return ""
        return f" Check that listener_name {listener!r} is one of its advertisedListeners."

    def _service(self, end_s: float) -> WireConnection:
        """A connection to a host of the service URL, one that stands before another."""
        with self._lock:
            standing = next(
                (one for host in self._hosts if (one := self._open.get(host)) and one.stands), None
            )
        if standing is not None:
            return standing
        *others, last = self._hosts
        for host in others:
            try:
                return self._connect(host, end_s)
            except BrokerUnavailableError:  # noqa: PERF203 - the next one may answer
                continue
        return self._connect(last, end_s)

    def _connect(self, address: Address, end_s: float) -> WireConnection:
        """The connection to an address; whoever asks first opens it."""
        with self._lock:
            opening = self._opening.setdefault(address, threading.Lock())
        if not opening.acquire(timeout=max(0.001, _left(end_s))):
            raise BrokerUnavailableError(f"The broker at {address} does not answer in time.")
        try:
            with self._lock:
                known = self._open.get(address)
                closed = self._closed
            if closed:
                raise BrokerError("The connection is closed.")
            if known is not None and known.stands:
                return known
            if known is not None:
                # It is telling whoever had it.
                known.join(_left(end_s))
            made = WireConnection(address, self._connection, self._credentials, _left(end_s))
            with self._lock:
                if not self._closed:
                    self._open[address] = made
                    return made
            made.close()
            raise BrokerError("The connection is closed.")
        finally:
            opening.release()

    def close(self, timeout_s: float) -> None:
        """End all connections, and wait for their threads. Idempotent.

        Args:
            timeout_s: Longest wait, seconds.
        """
        end_s = time.monotonic() + timeout_s
        with self._lock:
            self._closed = True
            known = list(self._open.values())
            self._open.clear()
        for one in known:
            one.close()
        for one in known:
            one.join(_left(end_s))


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _left(end_s: float) -> float:
    return max(0.0, end_s - time.monotonic())


def _address(host: str, *, tls: bool) -> Address:
    """``host:port`` as a URL has it."""
    parts = urlsplit(f"//{host}")
    return Address(parts.hostname or "", parts.port or (6651 if tls else 6650))
