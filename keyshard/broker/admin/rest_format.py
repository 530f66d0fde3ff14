"""Format of the admin REST interface: paths after ``/admin/v2/``, and parts of answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import httpx

from keyshard.broker.admin.http import UNEXPECTED
from keyshard.core.position.entry import EntryId, TopicPartition, namespace_of
from keyshard.core.releases import denies_partition
from keyshard.core.topic_schema import TopicSchema
from keyshard.core.topic_segments import (
    SCALABLE,
    SEGMENT,
    UNESCAPED,
    is_scalable,
    is_segment,
    topic_of,
)
from keyshard.redaction import shown

_UNEXPECTED = re.compile(r"unexpected error occurred in the server ---\s+Message: (.*)")
"""Reason of an error that the broker did not expect. Its stack follows."""
_NO_OWNER = "find owner"
"""Part of a broker's error for a topic that is being moved or was just unloaded."""
_BUSY = (httpx.codes.REQUEST_TIMEOUT, httpx.codes.TOO_MANY_REQUESTS)
"""Status of a request that came too slowly, or of one more than ``httpRequestsMaxPerSecond``."""
_INTERNAL = "#pulsar.internal."
"""Prefix of properties that the broker sets, keeps by itself, and refuses in a request."""


def namespace_path(tenant: str, namespace: str) -> str:
    """Return the path of the persistent topics of a namespace."""
    return f"persistent/{quote(tenant)}/{quote(namespace)}"


def topic_path(topic: str) -> str:
    """Return the path of a persistent topic, or of one of its topic partitions."""
    tenant, namespace, name = topic.removeprefix("persistent://").split("/")
    return f"{namespace_path(tenant, namespace)}/{quote(name, safe='')}"


def scalable_path(topic: str) -> str:
    """Return the path of a scalable topic."""
    return f"scalable/{quote(topic.removeprefix(SCALABLE), safe='/' + UNESCAPED)}"


def stats_path(topic_partition: TopicPartition, *, oldest: bool = False) -> str:
    """Return the path of the statistics of a topic partition, a segment, or a scalable topic.

    Args:
        topic_partition: The topic partition.
        oldest: Whether to ask for the age of the backlog, which is not known of a segment.
    """
    if is_scalable(topic_partition.topic):
        return f"{scalable_path(topic_partition.topic)}/stats"
    if not is_segment(topic_partition):
        path = f"{topic_path(topic_partition.name)}/stats?subscriptionBacklogSize=false"
        return path + "&getEarliestTimeInBacklog=true" * oldest
    number = topic_partition.topic.rpartition("-")[2]
    return f"{scalable_path(topic_of(topic_partition))}/segments/{number}/stats"


def own_policy(topic: str, policy: str) -> tuple[str, ...]:
    """Return the path of a policy of a topic; scalable topics and segments have none."""
    if topic.startswith((SCALABLE, SEGMENT)):
        return ()
    return (f"{topic_path(topic)}/{policy}?applied=true",)


def of_namespace(topic: str, policy: str) -> str:
    """Return the path of a policy of the namespace of a topic, given by its full name."""
    return f"namespaces/{quote(namespace_of(topic))}/{policy}"


def names_of(found: list[Any]) -> set[str]:
    """Return the names in a list."""
    if not isinstance(found, list):
        raise TypeError(f"{shown(found)} is not a list of names")
    return set(map(str, found))


def use_of(stats: Mapping[str, Any], subscription: str) -> tuple[bool, bool]:
    """Return whether others used a topic, and whether its subscription exists without consumers."""
    subscriptions = stats["subscriptions"]
    others = set(subscriptions) - {subscription}
    used = bool(stats.get("publishers") or stats.get("msgInCounter") or others)
    return used, subscription in subscriptions and not subscriptions[subscription]["consumers"]


def own_properties(found: Mapping[str, Any]) -> dict[str, str]:
    """Return the properties of a subscription without those of the broker."""
    return {name: str(found[name]) for name in found if not name.startswith(_INTERNAL)}


def number_of(found: object) -> int | None:
    """Return a number, written as one or as text; ``None`` if there is none."""
    return None if found is None else int(str(found))


def schema_of(found: Mapping[str, Any]) -> TopicSchema:
    """Return a version of a schema."""
    return TopicSchema(
        str(found["type"]),
        str(found.get("data") or "").encode(),
        int(found["version"]),
        dict(found.get("properties") or {}),
    )


def held_back(found: Mapping[str, Any]) -> tuple[str, EntryId | None]:
    """Return the state of a topic's transactions, and the last entry before an open one."""
    state = str(found["state"])
    if not found["ongoingTxnSize"]:
        return state, None
    ledger, entry = map(int, str(found["maxReadPosition"]).split(":"))
    return state, EntryId(ledger, entry)


def reason_of(response: httpx.Response) -> str | None:
    """Return Pulsar's reason for a refusal; ``None`` if the answer is not from Pulsar."""
    try:
        return str(response.json()["reason"])
    except UNEXPECTED:
        return None


def said_by(response: httpx.Response) -> str:
    """Return why a request was refused: Pulsar's reason without its stack, or plain text."""
    reason = reason_of(response)
    if reason is not None:
        unexpected = _UNEXPECTED.search(reason)
        return unexpected[1] if unexpected else reason
    # Not the page of a web server or a proxy.
    page = response.headers.get("content-type", "").startswith("text/html")
    plain = "" if page or response.text.lstrip().startswith("<") else response.text[:200]
    return plain or response.reason_phrase


def may_pass(response: httpx.Response) -> bool:
    """Return whether a request that was refused may succeed later."""
    status = response.status_code
    moving = status == httpx.codes.PRECONDITION_FAILED and _NO_OWNER in said_by(response)
    return response.is_server_error or status in _BUSY or moving


def says_missing(response: httpx.Response) -> bool:
    """Return whether Pulsar says that something does not exist. A proxy with a wrong route, or
    without a broker behind it, also answers 404. Trusting that would drop existing topics."""
    reason = reason_of(response)
    if response.status_code == httpx.codes.CONFLICT:
        return reason is not None and denies_partition(reason)
    return response.status_code == httpx.codes.NOT_FOUND and reason is not None
