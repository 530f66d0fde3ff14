"""The admin REST interface: checks that the client cannot make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import httpx

from keyshard.core.entry import TopicPartition
from keyshard.errors import AdminError, BrokerUnavailableError

TIMEOUT_S = 10.0
"""Longest time of one request, seconds."""


class PulsarAdmin:
    """Read-only calls of ``/admin/v2``.

    Args:
        admin_url: ``http://host:port``.

    Every method raises BrokerUnavailableError (retriable) when there is no answer, and AdminError
    when the request is refused.
    """

    def __init__(self, admin_url: str) -> None:
        self._url = admin_url.rstrip("/")
        self._client = httpx.Client(timeout=TIMEOUT_S, follow_redirects=True)

    def cluster(self) -> str:
        """Name of the cluster; the first where it knows several."""
        names = self._get("clusters")
        return str(min(names)) if names else ""

    def topic_exists(self, topic: str) -> bool:
        """Whether a topic exists, partitioned or not."""
        found = self._get(f"{_path(topic)}/partitions", missing={"partitions": 0})
        if found["partitions"] > 0:
            return True
        tenant, namespace, _ = topic.removeprefix("persistent://").split("/")
        return topic in self._get(f"persistent/{quote(tenant)}/{quote(namespace)}")

    def subscription(
        self, topic_partition: TopicPartition, subscription: str
    ) -> Mapping[str, Any] | None:
        """Statistics of a subscription as the broker names them; ``None`` when there is none."""
        stats = self._get(
            f"{_path(topic_partition.name)}/stats?subscriptionBacklogSize=false", missing={}
        )
        result: Mapping[str, Any] | None = stats.get("subscriptions", {}).get(subscription)
        return result

    def unacknowledged_limits(self, topic: str) -> tuple[int, int]:
        """Messages left unacknowledged per consumer and per subscription; 0 for no limit."""
        found = [
            self._get(f"{_path(topic)}/{name}?applied=true")
            for name in ("maxUnackedMessagesOnConsumer", "maxUnackedMessagesOnSubscription")
        ]
        return int(found[0] or 0), int(found[1] or 0)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _get(self, path: str, missing: Any = None) -> Any:
        try:
            response = self._client.get(f"{self._url}/admin/v2/{path}")
            if response.status_code == httpx.codes.NOT_FOUND and missing is not None:
                return missing
            response.raise_for_status()
            return response.json()
        except httpx.TransportError as exc:
            raise BrokerUnavailableError(
                f"{self._url} does not answer: {exc}. Check admin.url and that the broker is "
                "running; without admin.url keyshard does without the checks it allows."
            ) from exc
        except (httpx.HTTPError, ValueError) as exc:
            raise AdminError(
                f"GET {path.partition('?')[0]} at {self._url} failed: {exc}. Check admin.url, or "
                "leave it out to do without the checks it allows."
            ) from exc


def _path(topic: str) -> str:
    tenant, namespace, name = topic.removeprefix("persistent://").split("/")
    return f"persistent/{quote(tenant)}/{quote(namespace)}/{quote(name, safe='')}"
