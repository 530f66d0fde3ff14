"""The admin REST interface: checks that the client cannot make."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import quote

import httpx

from keyshard.broker.port import BEGINS
from keyshard.broker.pulsar.admin_http import TIMEOUT_S, UNEXPECTED, AdminHttp
from keyshard.config.connection import Connection
from keyshard.core.holes.broker_state import BrokerState
from keyshard.core.message import MessageId
from keyshard.core.position.entry import (
    EntryId,
    TopicPartition,
    full_topic_name,
    is_system_topic,
)
from keyshard.core.position.ledger import Ledger, last_written_of, ledgers_of
from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import AdminError, AuthorizationError, BrokerError, BrokerUnavailableError
from keyshard.redaction import shown

_log = logging.getLogger(__name__)
T = TypeVar("T")
CREATE_S = 30.0
"""Longest time to make a topic with its partitions, seconds."""
_NO_OWNER = "find owner"
"""What a broker says of a topic that is between two brokers, or was unloaded this moment."""
_OFF = "transactionCoordinatorEnabled"
"""Setting of a broker that knows no transactions, which it names then."""
_RECOVERING = ("None", "Initializing", "Close")
"""States in which a broker that loads a topic does not know its transactions: it tells of none."""

_UNACKNOWLEDGED = (
    ("maxUnackedMessagesOnConsumer", "maxUnackedMessagesPerConsumer", 50_000),
    ("maxUnackedMessagesOnSubscription", "maxUnackedMessagesPerSubscription", 200_000),
)
"""Limits by their names as policies of a topic and of a namespace, and the broker's defaults."""


class PulsarAdmin:
    """Calls of ``/admin/v2``. All read only, but :meth:`remove_leftover` and :meth:`create`.

    Args:
        connection: It has an ``admin_url``.
        first_s: Longest time until anything comes of its first answer, seconds.

    Every method raises BrokerUnavailableError (retriable) when there is no answer, or one of status
    500 and above; AdminError when the request is refused, and what :meth:`AdminHttp.request` raises
    of TLS and permissions. Only Pulsar's own 404 says that something does not exist.
    """

    def __init__(self, connection: Connection, first_s: float = TIMEOUT_S) -> None:
        self._http = AdminHttp(connection, first_s)
        self._has_transactions = True

    def version(self) -> str:
        """Version of the broker, such as ``4.0.8``."""
        path = "brokers/version"
        return self._checked(path, self._request("GET", path)).text.strip().strip('"')

    def settings(self) -> Mapping[str, str]:
        """Configuration of the broker by name; empty where this user may not see it."""
        path = "brokers/configuration/runtime"
        try:
            response = self._request("GET", path)
        except AuthorizationError:
            return {}
        return self._understood(path, self._checked(path, response), dict)

    def cluster(self) -> str:
        """Name of the cluster; the first where it knows several."""
        return self._get("clusters", lambda names: str(min(names)) if names else "")

    def partition_count(self, topic: str) -> int | None:
        """Partitions of a topic: 0 for one that is not partitioned, ``None`` for none at all."""
        return self._told(f"{_path(topic)}/partitions", lambda found: int(found["partitions"]))

    def create(self, topic: str, partitions: int) -> bool:
        """Make sure that a topic exists with a number of partitions; whether it was made now."""
        path = f"{_path(full_topic_name(topic))}/partitions"
        answer = self._request("PUT", path, json=partitions, timeout=CREATE_S)
        if answer.status_code != httpx.codes.CONFLICT:
            self._checked(path, answer)
            return True
        existing = self.partition_count(full_topic_name(topic))
        if existing == partitions:
            return False
        kind = f"with {existing} partitions" if existing else "without partitions"
        raise AdminError(
            f"Topic {topic} exists {kind}, not with {partitions}. Choose that number or another "
            "topic.",
            topic=topic,
        )

    def namespaces(self, tenant: str) -> set[str]:
        """Names of the namespaces of a tenant, without it; refused where the tenant is not."""
        names = self._get(f"namespaces/{quote(tenant, safe='')}", _names)
        return {name.partition("/")[2] for name in names}

    def topics(self, tenant: str, namespace: str) -> set[str]:
        """Full names of all persistent topics of a namespace, without their partitions.

        A topic that is not partitioned but is called ``...-partition-N`` is left out.
        """
        path = _namespace(tenant, namespace)
        stored = self._get(path, _names)
        plain = {name for name in stored if TopicPartition.parse(name).partition < 0}
        return plain | self._get(f"{path}/partitioned", _names)

    def created(self, topic_partition: TopicPartition) -> str:
        """When its storage was created: another text after it was deleted and created again."""
        path = f"{_path(topic_partition.name)}/internal-info"
        return self._get(path, lambda found: str(found.get("creationDate")))

    def remove_leftover(self, topic_partition: TopicPartition, subscription: str) -> bool | None:
        """Delete what a reconnect of ours created of a deleted topic; whether it is gone now.

        It stays when it holds an entry, or anybody but consumers of ours was there. ``None``: a
        consumer of the subscription is connected, which may be ours and about to be closed.
        """
        path = _path(topic_partition.name)
        stats = f"{path}/stats?subscriptionBacklogSize=false"
        told = self._told(stats, lambda found: _use_of(found, subscription))
        if told is None:
            return True
        used, connected = told
        if used or self._told(f"{path}/internalStats", lambda found: found.get("numberOfEntries")):
            return False
        if connected:
            return None
        answer = self._request("DELETE", path)
        return answer.is_success or _says_missing(answer)

    def subscription(
        self, topic_partition: TopicPartition, subscription: str
    ) -> Mapping[str, Any] | None:
        """Statistics of a subscription as the broker names them; ``None`` when there is none."""
        return self.subscriptions(topic_partition).get(subscription)

    def subscriptions(self, topic_partition: TopicPartition) -> Mapping[str, Mapping[str, Any]]:
        """Statistics of every subscription, by name; none where there is no such topic."""
        path = f"{_path(topic_partition.name)}/stats?subscriptionBacklogSize=false"
        return self._told(path, lambda found: dict(found.get("subscriptions", {}))) or {}

    def begin(
        self, topic_partition: TopicPartition, subscription: str, position: MessageId
    ) -> bool:
        """Create a subscription that begins at an entry; ``False`` where it exists already."""
        path = _subscription_path(topic_partition, subscription)
        where = {"ledgerId": position.ledger, "entryId": position.entry, "partitionIndex": -1}
        properties = {"properties": {BEGINS: str(position)}} if position.batch_index else {}
        answer = self._request("PUT", path, json=where | properties, timeout=CREATE_S)
        if answer.status_code == httpx.codes.CONFLICT:
            return False
        self._checked(path, answer)
        return True

    def begins_whole(self, topic_partition: TopicPartition, subscription: str) -> None:
        """Take the property :data:`BEGINS` from a subscription; it keeps its others."""
        path = f"{_subscription_path(topic_partition, subscription)}/properties"
        properties = self._get(path, lambda found: {name: str(found[name]) for name in found})
        others = {name: text for name, text in properties.items() if name != BEGINS}
        self._checked(path, self._request("PUT", path, json=others))

    def unacknowledged_limits(self, topic: str) -> tuple[int, int]:
        """Messages left unacknowledged per consumer and per subscription; 0 for no limit.

        A cluster without policies of topics answers for the namespace, or has Pulsar's defaults.
        """
        per_consumer, per_subscription = (
            self._limit(topic, of_topic, of_namespace, default)
            for of_topic, of_namespace, default in _UNACKNOWLEDGED
        )
        return per_consumer, per_subscription

    def _limit(self, topic: str, of_topic: str, of_namespace: str, default: int) -> int:
        path = f"{_path(topic)}/{of_topic}?applied=true"
        response = self._request("GET", path)
        if response.status_code != httpx.codes.METHOD_NOT_ALLOWED:
            return int(self._understood(path, self._checked(path, response), _number) or 0)
        path = f"namespaces/{'/'.join(_path(topic).split('/')[1:3])}/{of_namespace}"
        response = self._checked(path, self._request("GET", path))
        limit = self._understood(path, response, _number) if response.content else None
        return default if limit is None else limit

    def broker_state(
        self, topic_partition: TopicPartition, subscription: str
    ) -> BrokerState | None:
        """Ledgers and cursor of a topic partition; ``None`` when there is no such topic."""
        return self._from_internal_stats(
            topic_partition, lambda stats: BrokerState.from_internal_stats(stats, subscription)
        )

    def ledgers(self, topic_partition: TopicPartition) -> tuple[Ledger, ...] | None:
        """Ledgers of a topic partition; ``None`` when there is no such topic."""
        return self._from_internal_stats(topic_partition, ledgers_of)

    def last_written(self, topic_partition: TopicPartition) -> EntryId | None:
        """The last entry that was written, stored or not; ``None`` for no topic."""
        return self._from_internal_stats(topic_partition, last_written_of)

    def held_back_behind(self, topic_partition: TopicPartition) -> EntryId | None:
        """The last entry that is shown, where an open transaction holds back what is behind it.

        The request does not load a topic: who asks right after :meth:`ledgers` has it loaded. A
        role that may not ask is told so in the log, and that none holds anything back.

        Raises:
            BrokerUnavailableError: The topic is not loaded, or is being loaded (retriable).
        """
        if not self._has_transactions:
            return None
        name = _path(topic_partition.name).removeprefix("persistent/")
        path = f"transactions/transactionBufferStats/{name}"
        try:
            response = self._http.request("GET", f"/admin/v3/{path}")
        except AuthorizationError as exc:
            _log.warning(
                "Whether open transactions hold back entries of %s is not known: %s Rows of theirs "
                "may be in neither of two reads that follow each other.",
                topic_partition,
                exc.message,
            )
            return None
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE and _OFF in response.text:
            self._has_transactions = False
            return None
        if _says_missing(response):
            raise self._recovering(topic_partition, "is not loaded")
        if is_system_topic(name) and not response.content:
            return None  # It takes no transactions.
        state, last = self._understood(path, self._checked(path, response), _held_back)
        if state in _RECOVERING:
            raise self._recovering(topic_partition, "is being loaded")
        return last

    def _recovering(self, topic_partition: TopicPartition, why: str) -> BrokerUnavailableError:
        return BrokerUnavailableError(
            f"The broker at {self._http.url} does not know yet whether an open transaction holds "
            f"back entries of {topic_partition}, because the topic {why}. Try again in a moment."
        )

    def position_at(self, topic_partition: TopicPartition, time_ms: int) -> EntryId | None:
        """A position at which times pass a moment; ``None`` when there is no such topic."""
        path = f"{_path(topic_partition.name)}/messageid/{time_ms}"
        return self._told(
            path, lambda found: EntryId(int(found["ledgerId"]), int(found["entryId"]))
        )

    def schema(self, topic: str, version: int | None = None) -> TopicSchema | None:
        """A version of the schema of a topic, by default the newest; ``None`` where none is."""
        which = "" if version is None else f"/{version}"
        path = f"schemas/{_path(topic).removeprefix('persistent/')}/schema{which}"
        return self._told(path, _schema)

    def _from_internal_stats(
        self, topic_partition: TopicPartition, read: Callable[[Mapping[str, Any]], T]
    ) -> T | None:
        return self._told(f"{_path(topic_partition.name)}/internalStats", read)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _get(self, path: str, read: Callable[[Any], T]) -> T:
        """Read an answer; its subject exists."""
        return self._understood(path, self._checked(path, self._request("GET", path)), read)

    def _told(self, path: str, read: Callable[[Any], T]) -> T | None:
        """What is read of an answer; ``None``: what is asked about does not exist."""
        response = self._request("GET", path)
        if _says_missing(response):
            return None
        return self._understood(path, self._checked(path, response), read)

    def _understood(self, path: str, response: httpx.Response, read: Callable[[Any], T]) -> T:
        try:
            return read(response.json())
        except UNEXPECTED as exc:
            raise AdminError(
                f"GET {path} at {self._http.url} says something unexpected: {exc!r}. Check "
                "admin_url, or leave it out to do without the checks it allows."
            ) from None

    def _checked(self, path: str, response: httpx.Response) -> httpx.Response:
        if response.is_success:
            return response
        reason = _reason(response)
        said = reason or response.text[:200] or response.reason_phrase
        told = f"status {response.status_code}, {said}"
        if response.status_code == httpx.codes.NOT_FOUND and reason is None:
            told += " (which Pulsar does not say: something else answers there)"
        moving = response.status_code == httpx.codes.PRECONDITION_FAILED and _NO_OWNER in said
        later = response.is_server_error or moving
        error = BrokerUnavailableError if later else AdminError
        raise self._failed(path, told, error)

    def _failed(self, path: str, exc: object, error: type[BrokerError] = AdminError) -> BrokerError:
        return error(
            f"Request {path.partition('?')[0]} at {self._http.url} failed: {exc}. Check "
            "admin_url, or leave it out to do without the checks it allows."
        )

    def _request(self, method: str, path: str, **content: Any) -> httpx.Response:
        return self._http.request(method, f"/admin/v2/{path}", **content)


def _names(found: list[Any]) -> set[str]:
    if not isinstance(found, list):
        raise TypeError(f"{shown(found)} is no list of names")
    return set(map(str, found))


def _use_of(stats: Mapping[str, Any], subscription: str) -> tuple[bool, bool]:
    """Whether anybody used a topic but one subscription; whether that has a consumer now."""
    subscriptions = stats["subscriptions"]
    others = set(subscriptions) != {subscription}
    used = bool(stats.get("publishers") or stats.get("msgInCounter") or others)
    return used, not others and bool(subscriptions[subscription]["consumers"])


def _number(found: object) -> int | None:
    return None if found is None else int(str(found))


def _schema(found: Mapping[str, Any]) -> TopicSchema:
    return TopicSchema(
        str(found["type"]),
        str(found.get("data") or "").encode(),
        int(found["version"]),
        dict(found.get("properties") or {}),
    )


def _held_back(found: Mapping[str, Any]) -> tuple[str, EntryId | None]:
    """How far a broker knows the transactions of a topic; and behind what one holds back."""
    state = str(found["state"])
    if not found["ongoingTxnSize"]:
        return state, None
    ledger, entry = map(int, str(found["maxReadPosition"]).split(":"))
    return state, EntryId(ledger, entry)


def _reason(response: httpx.Response) -> str | None:
    """Why Pulsar refuses a request; ``None``: it is not Pulsar that does."""
    try:
        return str(response.json()["reason"])
    except UNEXPECTED:
        return None


def _says_missing(response: httpx.Response) -> bool:
    """Whether something does not exist. A proxy with a wrong route, or without a broker behind it,
    answers 404 as well: believed, that would let go of topics that are there."""
    return response.status_code == httpx.codes.NOT_FOUND and _reason(response) is not None


def _namespace(tenant: str, namespace: str) -> str:
    return f"persistent/{quote(tenant)}/{quote(namespace)}"


def _subscription_path(topic_partition: TopicPartition, subscription: str) -> str:
    return f"{_path(topic_partition.name)}/subscription/{quote(subscription, safe='')}"


def _path(topic: str) -> str:
    tenant, namespace, name = topic.removeprefix("persistent://").split("/")
    return f"{_namespace(tenant, namespace)}/{quote(name, safe='')}"
