"""The admin REST interface: checks that the client cannot make."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar
from urllib.parse import quote

import httpx

from keyshard.broker.admin.http import TIMEOUT_S, UNEXPECTED, AdminHttp
from keyshard.broker.admin.port import BEGINS_PROPERTY
from keyshard.broker.admin.rest_format import (
    held_back,
    may_pass,
    names_of,
    namespace_path,
    number_of,
    of_namespace,
    own_policy,
    own_properties,
    reason_of,
    said_by,
    says_missing,
    scalable_path,
    schema_of,
    stats_path,
    topic_path,
    use_of,
)
from keyshard.config.connection import Connection
from keyshard.core.creation import create_or_correct
from keyshard.core.message import MessageId
from keyshard.core.position.entry import (
    EntryId,
    TopicPartition,
    full_topic_name,
    is_system_topic,
)
from keyshard.core.position.ledger import (
    Ledger,
    last_written_of,
    ledgers_of,
    placed_ledgers_of,
)
from keyshard.core.position.replicas import offloads_of
from keyshard.core.refused_limits import limit_in, limit_refused
from keyshard.core.subscription_state import CursorState
from keyshard.core.topic_schema import TopicSchema
from keyshard.core.topic_segments import is_scalable, is_segment
from keyshard.errors import (
    AdminError,
    AuthorizationError,
    BrokerError,
    BrokerUnavailableError,
    TopicNotFoundError,
)

_log = logging.getLogger(__name__)
T = TypeVar("T")
CREATE_S = 30.0
"""Longest time to create a topic with its partitions, or a subscription, seconds."""
_OFF = "transactionCoordinatorEnabled"
"""Setting that a broker without transactions names in its error."""
_RECOVERING = ("None", "Initializing", "Close")
"""States of a topic that is being loaded: the broker does not know its transactions yet."""

_SUBSCRIPTIONS, _CREATES = "autoSubscriptionCreation", "allowAutoSubscriptionCreation"
"""Policy of a namespace about new subscriptions, and its value; also a setting of the broker."""

_UNACKNOWLEDGED = (
    ("maxUnackedMessagesOnConsumer", "maxUnackedMessagesPerConsumer", 50_000),
    ("maxUnackedMessagesOnSubscription", "maxUnackedMessagesPerSubscription", 200_000),
)
"""Limits by their names as policies of a topic and of a namespace, and the broker's defaults."""
_CONSUMERS = (
    ("maxConsumers", "maxConsumersPerTopic"),
    ("maxConsumersPerSubscription", "maxConsumersPerSubscription"),
)
"""The same without defaults; the broker has a setting of the same name as the namespace."""


class PulsarAdmin:
    """Calls of ``/admin/v2``. Methods that change the broker: :meth:`remove_leftover`,
    :meth:`create`, :meth:`begin`, :meth:`register`, :meth:`unregister` and :meth:`set_property`.

    Args:
        connection: A connection with an ``admin_url``.
        first_s: Longest time without data for its first answer, seconds.

    Every method raises BrokerUnavailableError (retriable) if there is no answer, or for a status
    of :func:`may_pass`, AdminError if the request is refused, and the errors of
    :meth:`AdminHttp.request`.
    Only Pulsar's own 404 means that something does not exist.
    """

    def __init__(self, connection: Connection, first_s: float = TIMEOUT_S) -> None:
        self._http = AdminHttp(connection, first_s)
        self._has_transactions = True

    def version(self) -> str:
        """Version of the broker, such as ``4.0.8``."""
        path = "brokers/version"
        return self._checked(path, self._request("GET", path)).text.strip().strip('"')

    def settings(self) -> Mapping[str, str] | None:
        """Configuration of the broker by name; ``None`` if this role may not read it."""
        path = "brokers/configuration/runtime"
        try:
            response = self._request("GET", path)
        except AuthorizationError:
            return None
        return self._understood(path, self._checked(path, response), dict)

    def cluster(self) -> str:
        """Name of the cluster; the first one if the broker knows several."""
        return self._get("clusters", lambda names: str(min(names)) if names else "")

    def partition_count(self, topic: str) -> int | None:
        """Number of partitions: 0 if not partitioned, ``None`` if it does not exist."""
        return self._query(
            f"{topic_path(topic)}/partitions", lambda found: int(found["partitions"])
        )

    def create(self, topic: str, partitions: int) -> bool:
        """Create a topic with a number of partitions, if it is missing. Return whether it was."""
        path = f"{topic_path(full_topic_name(topic))}/partitions"
        answer = self._request("PUT", path, json=partitions, timeout=CREATE_S)
        if answer.status_code != httpx.codes.CONFLICT:
            self._checked(path, answer)
            return True
        existing = self.partition_count(full_topic_name(topic))
        if existing == partitions:
            return False
        kind = f"with {existing} partitions" if existing else "without partitions"
        raise AdminError(
            f"Topic {topic} exists {kind}, but {partitions} partitions were requested.",
            "Request the existing number, or choose another topic.",
            topic=topic,
        )

    def namespaces(self, tenant: str) -> set[str]:
        """Names of the namespaces of a tenant, without the tenant, which must exist."""
        names = self._get(f"namespaces/{quote(tenant, safe='')}", names_of)
        return {name.partition("/")[2] for name in names}

    def topics(self, tenant: str, namespace: str) -> set[str]:
        """See :meth:`Admin.topics`."""
        path = namespace_path(tenant, namespace)
        stored = self._get(path, names_of)
        plain = {name for name in stored if TopicPartition.parse(name).partition < 0}
        return plain | self._get(f"{path}/partitioned", names_of)

    def scalable_topics(self, tenant: str, namespace: str) -> set[str] | None:
        """See :meth:`Admin.scalable_topics`."""
        path = scalable_path(f"{tenant}/{namespace}")
        answer = self._request("GET", path)
        if answer.status_code == httpx.codes.NOT_FOUND and reason_of(answer) is None:
            return None
        found = self._understood(path, self._checked(path, answer), names_of)
        if not found:
            # 5.0.1 lists nothing of a namespace that does not exist.
            self._get(namespace_path(tenant, namespace), names_of)
        return found

    def created(self, topic_partition: TopicPartition) -> str:
        """Creation time of the topic's storage as text; it changes if the topic is recreated."""
        if is_segment(topic_partition):
            path, name = stats_path(topic_partition), "topicCreationTime"
        else:
            path, name = f"{topic_path(topic_partition.name)}/internal-info", "creationDate"
        return self._get(path, lambda found: str(found.get(name)))

    def stored_bytes(self, segment: TopicPartition) -> int | None:
        """See :meth:`Admin.stored_bytes`."""
        return self._query(stats_path(segment), lambda found: int(found["storageSize"]))

    def remove_leftover(self, topic_partition: TopicPartition, subscription: str) -> bool | None:
        """See :meth:`Admin.remove_leftover`."""
        path = topic_path(topic_partition.name)
        stats = f"{path}/stats?subscriptionBacklogSize=false"
        usage = self._query(stats, lambda found: use_of(found, subscription))
        if usage is None:
            return True
        used, settled = usage
        if used or self._query(f"{path}/internalStats", lambda found: found.get("numberOfEntries")):
            return False
        if not settled:
            return None
        answer = self._request("DELETE", path)
        return answer.is_success or says_missing(answer) or None

    def subscription(
        self, topic_partition: TopicPartition, subscription: str, *, oldest: bool = False
    ) -> Mapping[str, Any] | None:
        """Statistics of a subscription, as the broker names them; ``None`` if there is none."""
        return self.subscriptions(topic_partition, oldest=oldest).get(subscription)

    def subscriptions(
        self, topic_partition: TopicPartition, *, oldest: bool = False
    ) -> Mapping[str, Mapping[str, Any]]:
        """Statistics of every subscription, by name; empty if there is no such topic."""
        path = stats_path(topic_partition, oldest=oldest)
        return self._query(path, lambda found: dict(found.get("subscriptions", {}))) or {}

    def begin(
        self, topic_partition: TopicPartition, subscription: str, position: MessageId
    ) -> bool:
        """Create a subscription that begins at an entry; ``False`` if it exists already."""
        path = f"{topic_path(topic_partition.name)}/subscription/{quote(subscription, safe='')}"
        where = {"ledgerId": position.ledger, "entryId": position.entry, "partitionIndex": -1}
        properties = (
            {"properties": {BEGINS_PROPERTY: str(position)}} if position.batch_index else {}
        )
        answer = self._request("PUT", path, json=where | properties, timeout=CREATE_S)
        if answer.status_code == httpx.codes.CONFLICT:
            return False
        self._checked(path, answer)
        return True

    def register(self, topic: str, subscription: str) -> None:
        """See :meth:`Admin.register`. Where the subscription exists, it stays as it is."""
        path = f"{scalable_path(topic)}/subscriptions/{quote(subscription, safe='')}?type=QUEUE"
        answer = self._request("PUT", path, timeout=CREATE_S)
        if answer.is_success:
            return
        # For a missing topic, 5.0.1 answers 500.
        looked = self._request("GET", scalable_path(topic)) if answer.is_server_error else answer
        if says_missing(looked):
            raise TopicNotFoundError(
                f"{topic} does not exist.", create_or_correct(topic), topic=topic
            )
        failed = f"Could not register subscription {subscription!r} with {topic} at"
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise AdminError(
                f"{failed} {self._http.where}, which does not know scalable topics.",
                "Set admin_url to a broker of Pulsar 5.0 or newer.",
            )
        error = BrokerUnavailableError if may_pass(answer) else AdminError
        raise error(
            f"{failed} {self._http.where}: {said_by(answer)}.",
            "Check admin_url and the log of the broker. Without the registration, the broker may "
            "delete messages that are not consumed yet.",
        )

    def unregister(self, topic: str, subscription: str) -> None:
        """See :meth:`Admin.unregister`."""
        path = f"{scalable_path(topic)}/subscriptions/{quote(subscription, safe='')}"
        answer = self._request("DELETE", path, timeout=CREATE_S)
        if not says_missing(answer):
            self._checked(path, answer)

    def set_property(
        self, topic_partition: TopicPartition, subscription: str, name: str, text: str | None
    ) -> bool:
        """Set a property of a subscription, or remove it (``None``); the others stay."""
        what = f"subscription/{quote(subscription, safe='')}/properties"
        before = self._ask(topic_partition, what, own_properties)
        if before is None:
            return False
        path = f"{topic_path(topic_partition.name)}/{what}"
        others = {one: before[one] for one in before if one != name}
        after = others if text is None else others | {name: text}
        answer = self._request("PUT", path, json=after)
        if says_missing(answer):
            return False
        self._checked(path, answer)
        return True

    def creates_subscriptions(self, topic: str) -> bool:
        """Whether the broker creates subscriptions of a topic; true if this role may not ask."""
        path = of_namespace(topic, _SUBSCRIPTIONS)
        try:
            response = self._checked(path, self._request("GET", path))
            if response.content:
                return self._understood(path, response, lambda found: bool(found[_CREATES]))
            return (self.settings() or {}).get(_CREATES) != "false"
        except (AuthorizationError, AdminError):
            return True

    def unacknowledged_limits(self, topic: str) -> tuple[int, int]:
        """See :meth:`Admin.unacknowledged_limits`."""
        per_consumer, per_subscription = (self._limit(topic, *limit) for limit in _UNACKNOWLEDGED)
        return per_consumer, per_subscription

    def consumer_limits(self, topic: str) -> tuple[int | None, int | None]:
        """See :meth:`Admin.consumer_limits`."""
        per_topic, per_subscription = (self._consumer_limit(topic, *limit) for limit in _CONSUMERS)
        return per_topic, per_subscription

    def _consumer_limit(self, topic: str, of_topic: str, name: str) -> int | None:
        for path in *own_policy(topic, of_topic), of_namespace(topic, name):
            response = self._request("GET", path)
            if response.status_code == httpx.codes.METHOD_NOT_ALLOWED:  # no topic policies
                continue
            # For a limit per subscription, Pulsar 5.0 does not apply that of the namespace.
            if self._checked(path, response).content:
                return int(self._understood(path, response, number_of) or 0)
        settings = self.settings()
        return None if settings is None else int(number_of(settings.get(name)) or 0)

    def retention_min(self, topic: str) -> int | None:
        """See :meth:`Admin.retention_min`."""
        path = of_namespace(topic, "retention")
        try:
            response = self._checked(path, self._request("GET", path))
        except AuthorizationError:
            return None
        if response.content:
            return self._understood(path, response, lambda at: int(at["retentionTimeInMinutes"]))
        settings = self.settings()
        return (
            None if settings is None else number_of(settings.get("defaultRetentionTimeInMinutes"))
        )

    def deduplicates(self, topic: str) -> bool | None:
        """See :meth:`Admin.deduplicates`."""
        path = f"{topic_path(topic)}/deduplicationEnabled?applied=true"
        response = self._request("GET", path)
        if response.status_code == httpx.codes.METHOD_NOT_ALLOWED:
            path = of_namespace(topic, "deduplication")
            response = self._request("GET", path)
        self._checked(path, response)
        if response.content:
            return self._understood(path, response, bool)
        settings = self.settings()
        return None if settings is None else settings.get("brokerDeduplicationEnabled") == "true"

    def deduplicates_by_topic(self, topic: str) -> bool:
        """Whether a policy of the topic itself enables deduplication."""
        path = f"{topic_path(topic)}/deduplicationEnabled"
        response = self._request("GET", path)
        if response.status_code == httpx.codes.METHOD_NOT_ALLOWED:  # no topic policies
            return False
        self._checked(path, response)
        return bool(response.content) and self._understood(path, response, bool)

    def _limit(self, topic: str, of_topic: str, name: str, default: int) -> int:
        for path in own_policy(topic, of_topic):
            response = self._request("GET", path)
            if response.status_code != httpx.codes.METHOD_NOT_ALLOWED:
                return int(self._understood(path, self._checked(path, response), number_of) or 0)
        path = of_namespace(topic, name)
        response = self._checked(path, self._request("GET", path))
        limit = self._understood(path, response, number_of) if response.content else None
        return default if limit is None else limit

    def broker_state(
        self, topic_partition: TopicPartition, subscription: str
    ) -> CursorState | None:
        """Ledgers and cursor of a topic partition; ``None`` if there is no such topic."""
        return self._from_internal_stats(
            topic_partition, lambda stats: CursorState.from_internal_stats(stats, subscription)
        )

    def ledgers(self, topic_partition: TopicPartition) -> tuple[Ledger, ...] | None:
        """Ledgers of a topic partition; ``None`` if there is no such topic."""
        return self._from_internal_stats(topic_partition, ledgers_of)

    def placed_ledgers(self, topic_partition: TopicPartition) -> tuple[Ledger, ...] | None:
        """As :meth:`ledgers`, with the placement of each ledger if this role may see it."""
        try:
            return self._from_internal_stats(topic_partition, placed_ledgers_of, metadata=True)
        except AuthorizationError as exc:
            why = f"its metadata is refused: {exc.message}"
            found = self.ledgers(topic_partition)
            return found and tuple(replace(one, placement=why) for one in found)

    def offloads(self, topic_partition: TopicPartition) -> Mapping[int, str] | None:
        """Id of the offload of each offloaded ledger; ``None`` if there is no topic."""
        return self._ask(topic_partition, "internal-info", offloads_of)

    def last_written(self, topic_partition: TopicPartition) -> EntryId | None:
        """The last entry that was written, stored or not; ``None`` if there is no topic."""
        return self._from_internal_stats(topic_partition, last_written_of)

    def held_back_behind(self, topic_partition: TopicPartition) -> EntryId | None:
        """See :meth:`Admin.held_back_behind`.

        The request does not load a topic; :meth:`ledgers` does, so call it first.
        """
        if not self._has_transactions or is_segment(topic_partition):
            return None
        name = topic_path(topic_partition.name).removeprefix("persistent/")
        path = f"transactions/transactionBufferStats/{name}"
        response = self._http.request("GET", f"/admin/v3/{path}")
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE and _OFF in response.text:
            self._has_transactions = False
            return None
        if says_missing(response):
            raise self._recovering(topic_partition, "is not loaded")
        if is_system_topic(name) and not response.content:
            return None  # A system topic has no transactions.
        state, last = self._understood(path, self._checked(path, response), held_back)
        if state in _RECOVERING:
            raise self._recovering(topic_partition, "is being loaded")
        return last

    def _recovering(self, topic_partition: TopicPartition, why: str) -> BrokerUnavailableError:
        return BrokerUnavailableError(
            f"The broker at {self._http.url} does not know yet whether an open transaction holds "
            f"back entries of {topic_partition}, because the topic {why}.",
            "Try again later.",
        )

    def position_at(self, topic_partition: TopicPartition, time_ms: int) -> EntryId | None:
        """A position at which entry times reach ``time_ms``; ``None`` if there is no such topic."""
        return self._ask(
            topic_partition, f"messageid/{time_ms}",
            lambda found: EntryId(int(found["ledgerId"]), int(found["entryId"])),
        )  # fmt: skip

    def schema(self, topic: str, version: int | None = None) -> TopicSchema | None:
        """A version of a topic's schema, by default the newest; ``None`` if there is none."""
        which = "" if version is None else f"/{version}"
        name = scalable_path(topic) if is_scalable(topic) else topic_path(topic)
        path = f"schemas/{name.partition('/')[2]}/schema{which}"
        return self._query(path, schema_of)

    def _from_internal_stats(
        self,
        topic_partition: TopicPartition,
        read: Callable[[Mapping[str, Any]], T],
        *,
        metadata: bool = False,
    ) -> T | None:
        query = "?metadata=true" if metadata else ""
        return self._ask(topic_partition, f"internalStats{query}", read)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _get(self, path: str, read: Callable[[Any], T]) -> T:
        """Read an answer whose subject exists."""
        return self._understood(path, self._checked(path, self._request("GET", path)), read)

    def _ask(
        self, topic_partition: TopicPartition, what: str, read: Callable[[Any], T]
    ) -> T | None:
        """As :meth:`_query`, of a topic partition; ``None`` for a segment as well."""
        if is_segment(topic_partition):
            return None
        return self._query(f"{topic_path(topic_partition.name)}/{what}", read)

    def _query(self, path: str, read: Callable[[Any], T]) -> T | None:
        """Read an answer; ``None`` if its subject does not exist."""
        response = self._request("GET", path)
        if says_missing(response):
            return None
        return self._understood(path, self._checked(path, response), read)

    def _understood(self, path: str, response: httpx.Response, read: Callable[[Any], T]) -> T:
        try:
            return read(response.json())
        except UNEXPECTED as exc:
            raise AdminError(
                f"The answer to GET {path} at {self._http.where} cannot be understood: {exc!r}.",
                "Check admin_url. Without admin_url, keyshard leaves out the checks that need it.",
            ) from None

    def _checked(self, path: str, response: httpx.Response) -> httpx.Response:
        if response.is_success:
            return response
        said = said_by(response)
        status = f"status {response.status_code}, {said}"
        if response.status_code == httpx.codes.NOT_FOUND and reason_of(response) is None:
            status += " (Pulsar does not send this text, so another program answers there)"
        if limit := limit_in(said):
            topic = path.partition("/subscription")[0].replace("/", "://", 1)
            raise limit_refused(limit, f"Request {path} failed", topic, said.rstrip("."))
        error = BrokerUnavailableError if may_pass(response) else AdminError
        raise self._failed(path, status, error)

    def _failed(self, path: str, exc: object, error: type[BrokerError] = AdminError) -> BrokerError:
        return error(
            f"Request {path.partition('?')[0]} at {self._http.where} failed: {exc}.",
            "Check admin_url. Without admin_url, keyshard leaves out the checks that need it.",
        )

    def _request(self, method: str, path: str, **content: Any) -> httpx.Response:
        return self._http.request(method, f"/admin/v2/{path}", **content)
