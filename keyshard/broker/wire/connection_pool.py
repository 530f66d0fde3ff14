"""The brokers of a cluster: topic look-ups, and one connection to each broker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

from keyshard.broker.auth.credentials import Credentials
from keyshard.broker.auth.errors import no_host_answers, no_ip_answers
from keyshard.broker.hosts import HostQuestions
from keyshard.broker.wire.connect import Address, resolved
from keyshard.broker.wire.connection import WireConnection
from keyshard.broker.wire.errors import NOT_AUTHENTICATED, RefusedError
from keyshard.broker.wire.frames import Frame, api
from keyshard.broker.wire.requests import new_id
from keyshard.config.connection import Connection, host_and_port
from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import BrokerError, BrokerUnavailableError
from keyshard.threads import owner

REDIRECTS_MAX = 20
"""Maximum number of redirects of one look-up; more count as a circle."""
KNOWN_MAX = 8
"""Maximum number of brokers that are asked beside the hosts of the service URL."""
SECOND_S = 3.0
"""Longest time to open a second connection beside an unresponsive one, seconds."""
SLOW_S = 1.0
"""Time after which an attempt to connect counts as slow, seconds."""
SLOW_AGAIN_S = 2.0
"""Pause after a slow failed attempt, seconds. Attempts within it fail at once."""
RETIRE_AGE_S = 5.0
"""Age below which the credentials of a connection count as fresh, seconds."""
PARTITIONS_MAX = 1_000_000
"""Maximum plausible number of partitions of a topic."""
PATTERN_MAX = 40
"""Characters of the names that a watch gives to the broker, whose default limit of a pattern,
``subscriptionPatternMaxLength``, is 50."""
_REDIRECT, _CONNECT = 0, 1
_SCHEMA_TYPES = dict(enumerate((
    "NONE", "STRING", "JSON", "PROTOBUF", "AVRO", "BOOLEAN", "INT8", "INT16", "INT32", "INT64",
    "FLOAT", "DOUBLE", "DATE", "TIME", "TIMESTAMP", "KEY_VALUE", "INSTANT", "LOCAL_DATE",
    "LOCAL_TIME", "LOCAL_DATE_TIME", "PROTOBUF_NATIVE",
)))  # fmt: skip
SCHEMA_NUMBERS = {name: number for number, name in _SCHEMA_TYPES.items()}
"""Numbers of the schema types in the protocol, by name."""
_NOT_READY = 6
_SERVICE = Address("service_url", 0)
"""The lane of attempts that have no connection to a host of the service URL yet."""


class ConnectionPool:
    """Looks topics up, and keeps connections.

    Args:
        connection: How the cluster is reached.
        credentials: Credentials for the brokers.
    """

    def __init__(self, connection: Connection, credentials: Credentials) -> None:
        self._connection = connection
        self._credentials = credentials
        self._hosts = [Address(*host_and_port(one, tls=connection.tls)) for one in connection.hosts]
        self._lock = threading.Lock()
        self._open: dict[Address, WireConnection] = {}
        self._opening: dict[Address, threading.Lock] = {}
        self._slow: dict[Address, tuple[float, BrokerUnavailableError]] = {}
        """Slow failed attempts to connect: when they failed, and why."""
        self._apart: list[WireConnection] = []
        """Connections that no look-up uses: of watches, and replaced ones."""
        self._closed = False
        self._owner = owner()

    @property
    def has_connected(self) -> bool:
        """Whether a host has answered as a broker so far."""
        return bool(self._open or self._apart)

    def partitions(self, topic: str, timeout_s: float, *, create: bool) -> int:
        """Return the number of partitions of a topic; 0 if it is not partitioned.

        If ``create``, a broker that auto-creates partitioned topics creates a missing topic.

        Raises:
            BrokerUnavailableError: No answer in time (retriable).
            RefusedError: The broker refuses.
        """
        end_s = time.monotonic() + timeout_s
        asked = api.PartitionedMetadata(topic=topic.encode(), create=create)
        service = self._service(end_s)
        count = int(self._ask(service, "partitioned_metadata", asked, end_s).partitions)
        if count > PARTITIONS_MAX:
            raise BrokerUnavailableError(
                f"The broker at {service.address} reports {count} partitions for {topic}, which "
                "is impossible.",
                "Check that service_url is the URL of a Pulsar broker.",
            )
        return count

    def schema(self, topic: str, version: int | None, timeout_s: float) -> TopicSchema:
        """Return a version of the schema of a topic; by default the newest.

        Raises:
            BrokerUnavailableError: No answer in time (retriable).
            RefusedError: The broker refuses, or has no schema.
        """
        end_s = time.monotonic() + timeout_s
        asked = api.GetSchema(topic=topic.encode())
        if version is not None:
            asked.version = version.to_bytes(8, "big")
        found = self._ask(self._service(end_s), "get_schema", asked, end_s)
        number, schema_info = found.schema.type, found.schema
        return TopicSchema(
            _SCHEMA_TYPES.get(number, f"number {number}"),
            schema_info.data,
            int.from_bytes(found.version, "big"),
            {_text(one.key): _text(one.value) for one in schema_info.properties},
        )

    def watch(
        self, prefix: str, changed: Callable[[Sequence[str]], None], timeout_s: float
    ) -> WireConnection | None:
        """Open a connection of its own on which the broker reports topics.

        A broker may list all topics of the prefix first, and a proxy may end a connection whose
        command it does not know. Neither must disturb consumers.

        Args:
            prefix: Beginning of the full names of the topics. The broker may report others, too.
            changed: Called by the reading thread with names of created and deleted topics.
            timeout_s: Longest wait, seconds.

        Returns:
            ``None`` if the broker does not report topics.

        Raises:
            BrokerUnavailableError: No answer in time (retriable).
            RefusedError: The broker refuses.
        """
        end_s = time.monotonic() + timeout_s

        def pushed(frame: Frame) -> None:
            if frame.name == "watch_topic_update":
                update = frame.command
                changed([_text(name) for name in (*update.new_topics, *update.deleted_topics)])

        made = self.apart(pushed, timeout_s)
        try:
            if not made.features.supports_topic_watchers:
                made.close()
                return None
            namespace, _, literal = prefix.removeprefix("persistent://").rpartition("/")
            # To truncate a longer prefix is harmless: the broker reports more topics.
            literal = literal.partition("\\")[0][:PATTERN_MAX]
            pattern = f".*/\\Q{literal}\\E.*" if literal else ".*"
            asked = api.WatchTopicList(
                watcher_id=new_id(), namespace=namespace.encode(), topics_pattern=pattern.encode()
            )
            made.ask("watch_topic_list", asked, _left(end_s))
        except BaseException:
            made.close()
            raise
        return made

    def apart(self, pushed: Callable[[Frame], None], timeout_s: float) -> WireConnection:
        """Open a connection that no look-up uses, for what the broker reports of topics.

        Args:
            pushed: Called by the reading thread with each report.
            timeout_s: Longest wait, seconds.

        Raises:
            BrokerUnavailableError: No answer in time (retriable).
            BrokerError: The pool is closed.
        """
        end_s = time.monotonic() + timeout_s
        made = self._first_of_ips(self._service(end_s).address, end_s, pushed)
        with self._lock:
            closed = self._closed
            self._apart = [one for one in self._apart if one.is_open]
            if not closed:
                self._apart.append(made)
        if closed:
            made.close()
            raise BrokerError("The connection is closed.")
        return made

    def path(
        self, topic: str, timeout_s: float
    ) -> Generator[Address, None, tuple[WireConnection, float]]:
        """Connect to the broker that serves a topic partition.

        Yields the address of each broker before the wait for it. A
        :class:`~keyshard.broker.retry.Retrier` resumes the generator when that address has a free
        thread. Returns a connection, and the remaining time, seconds. Time in which the generator
        is suspended does not count.

        Raises:
            BrokerUnavailableError: No answer in time (retriable).
            RefusedError: The broker refuses.
        """
        end_s = yield from _stop_at(_SERVICE, time.monotonic() + timeout_s)
        asked = self._service(end_s)
        authoritative = False
        for _ in range(REDIRECTS_MAX):
            end_s = yield from _stop_at(asked.address, end_s)
            _check_responsive(asked)
            found = self._look_up(asked, topic, authoritative, end_s)
            target = self._target(found, asked)
            end_s = yield from _stop_at(target, end_s)
            connected = self._connect(target, end_s)
            if found.response == _CONNECT:
                return connected, max(0.001, _left(end_s))
            asked, authoritative = connected, found.authoritative
        raise BrokerUnavailableError(
            f"The brokers redirected the lookup of {topic} more than {REDIRECTS_MAX} times.",
            "Check the health of the cluster.",
        )

    def _look_up(self, asked: WireConnection, topic: str, authoritative: bool, end_s: float) -> Any:
        question = api.Lookup(topic=topic.encode(), authoritative=authoritative)
        if self._connection.listener_name is not None:
            question.listener_name = self._connection.listener_name.encode()
        try:
            found = self._ask(asked, "lookup", question, end_s)
        except RefusedError as exc:
            if exc.code != _NOT_READY or not question.HasField("listener_name"):
                raise
            raise BrokerUnavailableError(
                f"{topic} cannot be reached: {exc.said}.",
                f"Check the health of the broker.{self._listener_hint()}",
            ) from exc
        if found.response not in (_REDIRECT, _CONNECT):
            raise RefusedError(found.error, found.message)
        return found

    def _ask(self, at: WireConnection, name: str, content: Any, end_s: float) -> Any:
        """Ask a broker; if the credentials of the connection have expired, replace it."""
        try:
            return at.ask(name, content, _left(end_s))
        except RefusedError as exc:
            if exc.code == NOT_AUTHENTICATED:
                self.retire(at)
            raise

    def _target(self, found: Any, asked: WireConnection) -> Address:
        tls = self._connection.tls
        url = (found.broker_url_tls if tls else found.broker_url).decode(errors="replace")
        if not url:
            raise BrokerUnavailableError(
                f"The broker at {asked.address} has no address {'with' if tls else 'without'} TLS.",
                f"Check its advertised addresses.{self._listener_hint()}",
            )
        try:
            target = Address(*host_and_port(url.partition("://")[2].rstrip("/"), tls=tls))
            named = bool(target.host.encode("idna")) and "\0" not in target.host
        except ValueError:
            named = False
        if not named:
            raise BrokerUnavailableError(
                f"The broker at {asked.address} names {url[:100]!r} as the owner of the topic, "
                "which is not an address.",
                "Check the advertised address of the owner.",
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
        """Return a connection that answers look-ups; prefer an open one to the service URL.

        Any broker answers look-ups; with a proxy, only a connection to the proxy does. Brokers
        known from earlier look-ups are therefore asked, too, if the service URL does not answer.
        """
        with self._lock:
            known = [one for one in self._open.values() if not one.address.behind_proxy]
            standing = [one for host in self._hosts if (one := self._open.get(host))]
        for one in (*standing, *known):
            if one.is_open and not one.unresponsive():
                return one
        known.sort(key=lambda one: one.opened_s, reverse=True)
        addresses = dict.fromkeys((*self._hosts, *(one.address for one in known[:KNOWN_MAX])))
        asking = HostQuestions(partial(self._connect, end_s=end_s), fail=self._owner)
        found = asking.first(list(addresses), _left(end_s))
        if found is not None:
            return found
        raise no_host_answers(
            self._connection.service_url,
            [(str(host), error) for host, error in asking.failed if host in self._hosts],
        )

    def _connect(self, address: Address, end_s: float) -> WireConnection:
        """Return the connection to an address; the first calling thread opens it."""
        asked_s = time.monotonic()
        with self._lock:
            opening = self._opening.setdefault(address, threading.Lock())
        if not opening.acquire(timeout=max(0.001, _left(end_s))):
            raise BrokerUnavailableError(
                f"The broker at {address} does not answer in time.", "Check that it is running."
            )
        try:
            with self._lock:
                known = self._open.get(address)
                closed = self._closed
            if closed:
                raise BrokerError("The connection is closed.")
            if known is not None and known.is_open:
                if not known.unresponsive() or address not in self._hosts:
                    _check_responsive(known)
                    return known
                # The host may be a load balancer: a new connection may reach another broker.
                end_s = min(end_s, time.monotonic() + SECOND_S)
            elif known is not None:
                # The lost connection is still notifying its handles.
                known.join(_left(end_s))
            slow = self._slow.get(address)
            if slow is not None and slow[0] + SLOW_AGAIN_S > asked_s:
                raise BrokerUnavailableError(slow[1].problem, slow[1].remedy) from slow[1]
            return self._opened(address, end_s)
        finally:
            opening.release()

    def _opened(self, address: Address, end_s: float) -> WireConnection:
        began_s = time.monotonic()
        try:
            made = self._first_of_ips(address, end_s)
        except BrokerUnavailableError as exc:
            if time.monotonic() - began_s > SLOW_S:
                self._slow[address] = time.monotonic(), exc
            raise
        with self._lock:
            closed, known = self._closed, self._open.get(address)
            if not closed:
                self._open[address] = made
        if closed:
            made.close()
            raise BrokerError("The connection is closed.")
        if known is not None and known.is_open:
            self._put_apart(known)
        return made

    def _first_of_ips(
        self,
        address: Address,
        end_s: float,
        pushed: Callable[[Frame], None] | None = None,
    ) -> WireConnection:
        """Connect to the IP address that answers first; the resolver gives the order."""

        def connect(one: Address) -> WireConnection:
            how = self._connection, self._credentials, _left(end_s), self._owner
            return WireConnection(one, *how, pushed=pushed)

        ips = resolved(address, self._connection)
        asking = HostQuestions(connect, discard=WireConnection.close, fail=self._owner)
        made = asking.first(ips, _left(end_s))
        if made is not None:
            return made
        raise no_ip_answers(str(address), [(one.ip, error) for one, error in asking.failed])

    def retire(self, at: WireConnection) -> None:
        """Replace a connection, so that the next one uses new credentials.

        The old connection stays open until its last consumer has gone. One of watches has none, and
        ends at once.
        """
        with self._lock:
            young = time.monotonic() - at.opened_s < RETIRE_AGE_S
            used = self._open.get(at.address) is at
            if young or not (used or at in self._apart):
                return
            if used:
                del self._open[at.address]
        self._put_apart(at)

    def _put_apart(self, at: WireConnection) -> None:
        """Use a connection for its handles only; it ends with the last of them."""
        with self._lock:
            self._apart = [one for one in self._apart if one.is_open and one is not at]
            self._apart.append(at)
        at.retire()

    def close(self, timeout_s: float) -> None:
        """End all connections, and wait for their threads. Idempotent.

        Args:
            timeout_s: Longest wait, seconds.
        """
        end_s = time.monotonic() + timeout_s
        with self._lock:
            self._closed = True
            known = [*self._open.values(), *self._apart]
            self._open.clear()
            self._apart.clear()
        for one in known:
            one.close()
        for one in known:
            one.join(_left(end_s))


def _stop_at(address: Address, end_s: float) -> Generator[Address, None, float]:
    """Yield an address. Return the deadline, moved by the time of the suspension."""
    began_s = time.monotonic()
    yield address
    return end_s + time.monotonic() - began_s


def _check_responsive(at: WireConnection) -> None:
    why = at.unresponsive()
    if why:
        raise BrokerUnavailableError(why)


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _left(end_s: float) -> float:
    return max(0.0, end_s - time.monotonic())
