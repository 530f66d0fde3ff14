"""The admin REST interface: checks that the client cannot make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import httpx

from keyshard.broker.http_log import unlogged
from keyshard.core.broker_state import BrokerState
from keyshard.core.entry import TopicPartition
from keyshard.errors import AdminError, BrokerUnavailableError

TIMEOUT_S = 10.0
"""Longest time of one request, seconds."""
CONNECT_S = 3.0
"""Longest time to be connected, seconds."""
_NOT_ALLOWED = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)


class PulsarAdmin:
    """Calls of ``/admin/v2``. All read only, but :meth:`remove_leftover`.

    Args:
        admin_url: ``http://host:port``.

    Every method raises BrokerUnavailableError (retriable) when there is no answer, and AdminError
    when the request is refused.
    """

    def __init__(self, admin_url: str) -> None:
        # Beside the URL, because every error and log line of the client shows that.
        url = httpx.URL(admin_url)
        auth = httpx.BasicAuth(url.username, url.password) if url.userinfo else None
        self._url = str(url.copy_with(userinfo=b"")).rstrip("/")
        self._client = httpx.Client(
            timeout=httpx.Timeout(TIMEOUT_S, connect=CONNECT_S), follow_redirects=True, auth=auth
        )

    def version(self) -> str:
        """Version of the broker, such as ``4.0.8``."""
        path = "brokers/version"
        return self._checked(path, self._request("GET", path)).text.strip().strip('"')

    def settings(self) -> Mapping[str, str]:
        """Configuration of the broker by name; empty where this user may not see it."""
        path = "brokers/configuration/runtime"
        response = self._request("GET", path)
        if response.status_code in _NOT_ALLOWED:
            return {}
        found: Mapping[str, str] = self._checked(path, response).json()
        return found

    def cluster(self) -> str:
        """Name of the cluster; the first where it knows several."""
        names = self._get("clusters")
        return str(min(names)) if names else ""

    def partition_count(self, topic: str) -> int | None:
        """Partitions of a topic: 0 for one that is not partitioned, ``None`` for none at all."""
        found = self._get(f"{_path(topic)}/partitions", missing={})
        return int(found["partitions"]) if found else None

    def topics(self, tenant: str, namespace: str) -> set[str]:
        """Full names of all persistent topics of a namespace, without their partitions.

        A topic that is not partitioned but is called ``...-partition-N`` is left out.
        """
        path = _namespace(tenant, namespace)
        stored = {str(name) for name in self._get(path)}
        plain = {name for name in stored if TopicPartition.parse(name).partition < 0}
        return plain | {str(name) for name in self._get(f"{path}/partitioned")}

    def created(self, topic_partition: TopicPartition) -> str:
        """When its storage was created: another text after it was deleted and created again."""
        return str(self._get(f"{_path(topic_partition.name)}/internal-info").get("creationDate"))

    def remove_leftover(self, topic_partition: TopicPartition, subscription: str) -> bool:
        """Delete what a reconnect of ours created of a deleted topic; whether it is gone now.

        It stays when it holds an entry, or anybody but our closed consumers was there.
        """
        path = _path(topic_partition.name)
        stats = self._get(f"{path}/stats?subscriptionBacklogSize=false", missing={})
        if not stats:
            return True
        subscriptions = stats["subscriptions"]
        if (
            stats.get("publishers")
            or stats.get("msgInCounter")
            or set(subscriptions) != {subscription}
            or subscriptions[subscription]["consumers"]
            or self._get(f"{path}/internalStats", missing={}).get("numberOfEntries")
        ):
            return False
        answer = self._request("DELETE", path)
        return answer.is_success or answer.status_code == httpx.codes.NOT_FOUND

    def subscription(
        self, topic_partition: TopicPartition, subscription: str
    ) -> Mapping[str, Any] | None:
        """Statistics of a subscription as the broker names them; ``None`` when there is none."""
        return self.subscriptions(topic_partition).get(subscription)

    def subscriptions(self, topic_partition: TopicPartition) -> Mapping[str, Mapping[str, Any]]:
        """Statistics of every subscription, by name; none where there is no such topic."""
        path = f"{_path(topic_partition.name)}/stats?subscriptionBacklogSize=false"
        found: Mapping[str, Mapping[str, Any]] = self._get(path, missing={}).get(
            "subscriptions", {}
        )
        return found

    def unacknowledged_limits(self, topic: str) -> tuple[int, int]:
        """Messages left unacknowledged per consumer and per subscription; 0 for no limit."""
        found = [
            self._get(f"{_path(topic)}/{name}?applied=true")
            for name in ("maxUnackedMessagesOnConsumer", "maxUnackedMessagesOnSubscription")
        ]
        return int(found[0] or 0), int(found[1] or 0)

    def broker_state(
        self, topic_partition: TopicPartition, subscription: str
    ) -> BrokerState | None:
        """Ledgers and cursor of a topic partition; ``None`` when there is no such topic."""
        path = f"{_path(topic_partition.name)}/internalStats"
        stats = self._get(path, missing={})
        if not stats:
            return None
        try:
            return BrokerState.from_internal_stats(stats, subscription)
        except (KeyError, TypeError, ValueError) as exc:
            raise AdminError(
                f"GET {path} at {self._url} says something unexpected: {exc!r}. Leave admin_url "
                "out to do without the checks it allows."
            ) from exc

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _get(self, path: str, missing: Any = None) -> Any:
        response = self._request("GET", path)
        if response.status_code == httpx.codes.NOT_FOUND and missing is not None:
            return missing
        try:
            return self._checked(path, response).json()
        except ValueError as exc:
            raise self._failed(path, exc) from exc

    def _checked(self, path: str, response: httpx.Response) -> httpx.Response:
        try:
            return response.raise_for_status()
        except httpx.HTTPError as exc:
            raise self._failed(path, exc) from exc

    def _failed(self, path: str, exc: Exception) -> AdminError:
        return AdminError(
            f"GET {path.partition('?')[0]} at {self._url} failed: {exc}. Check admin_url, or "
            "leave it out to do without the checks it allows."
        )

    def _request(self, method: str, path: str) -> httpx.Response:
        try:
            with unlogged():
                return self._client.request(method, f"{self._url}/admin/v2/{path}")
        except httpx.TransportError as exc:
            raise BrokerUnavailableError(
                f"{self._url} does not answer: {exc}. Check admin_url and that the broker is "
                "running; without admin_url keyshard does without the checks it allows."
            ) from exc
        except httpx.HTTPError as exc:
            raise AdminError(f"{method} {path} at {self._url} failed: {exc}.") from exc


def _namespace(tenant: str, namespace: str) -> str:
    return f"persistent/{quote(tenant)}/{quote(namespace)}"


def _path(topic: str) -> str:
    tenant, namespace, name = topic.removeprefix("persistent://").split("/")
    return f"{_namespace(tenant, namespace)}/{quote(name, safe='')}"
