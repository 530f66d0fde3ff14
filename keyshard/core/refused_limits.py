"""Recognises the broker's limit on consumers, producers, subscriptions or topics in a refusal.

A broker refuses a consumer with the code ``ConsumerBusy`` both if another consumer has its range
and if a limit is reached. Only the text of the refusal distinguishes the two. The texts are those
of Pulsar 4.0 and 5.0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from keyshard.core.position.entry import namespace_of
from keyshard.errors import LimitReachedError

_CODES = {0, 5, 16, 22}
"""``UnknownError``, ``ConsumerBusy``, ``ProducerBusy`` and ``NotAllowedError``."""
_NOBODY: Mapping[str, int] = MappingProxyType({})
_JAVA_CLASS = re.compile(r"^(?:[\w$]+\.)+[\w$]+: ")


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit of the broker."""

    setting: str
    """Its name in ``broker.conf``."""
    counted: str
    """The things that it counts, as an object of "counts"."""
    sign: str
    """Part of the broker's text."""
    fewer: str
    """How to stay below it, as an imperative."""
    namespace: str = ""
    """Command of ``pulsar-admin namespaces`` with its option, if there is one."""
    topic: str = ""
    """Command of ``pulsar-admin topicPolicies`` with its option, if there is one."""

    def remedy(self, namespace: str) -> str:
        """Return the commands that raise the limit, as an imperative without a full stop."""
        ways = []
        if self.namespace:
            ways.append(f"pulsar-admin namespaces {self.namespace} NUMBER {namespace}")
        if self.topic:
            ways.append(f"pulsar-admin topicPolicies {self.topic} NUMBER TOPIC, for one topic")
        ways.append(f"{self.setting} in broker.conf, for all namespaces")
        return f"raise the limit: {'; or '.join(ways)}"


_CONSUMERS = "Lower parallelism, stop other consumers and readers"
_PRODUCERS = "Close other producers of the topic"
MAX_CONSUMERS_PER_TOPIC = Limit(
    "maxConsumersPerTopic",
    "the consumers of a topic partition, over all subscriptions and readers",
    "Topic reached max consumers limit",
    _CONSUMERS,
    "set-max-consumers-per-topic -c",
    "set-max-consumers -c",
)
MAX_CONSUMERS_PER_SUBSCRIPTION = Limit(
    "maxConsumersPerSubscription",
    "the consumers of a subscription in a topic partition",
    "Subscription reached max consumers limit",
    _CONSUMERS,
    "set-max-consumers-per-subscription -c",
    "set-max-consumers-per-subscription -c",
)
_LIMITS = (
    MAX_CONSUMERS_PER_TOPIC,
    MAX_CONSUMERS_PER_SUBSCRIPTION,
    Limit(
        "maxSameAddressConsumersPerTopic",
        "the consumers of a topic partition from one client address",
        "reached max same address consumers limit",
        f"{_CONSUMERS} of this machine",
    ),
    Limit(
        "maxProducersPerTopic",
        "the producers of a topic partition",
        "reached max producers limit",
        _PRODUCERS,
        "set-max-producers-per-topic -p",
        "set-max-producers -p",
    ),
    Limit(
        "maxSameAddressProducersPerTopic",
        "the producers of a topic partition from one client address",
        "reached max same address producers limit",
        f"{_PRODUCERS} on this machine",
    ),
    Limit(
        "maxSubscriptionsPerTopic",
        "the subscriptions of a topic partition, and its open readers",
        "Exceed the maximum number of subscriptions of the topic",
        "Delete a subscription that nobody needs",
        "set-max-subscriptions-per-topic -m",
        "set-max-subscriptions-per-topic -s",
    ),
    Limit(
        "maxTopicsPerNamespace",
        "the topics of a namespace, and each topic partition as one",
        "Exceed maximum number of topics in namespace",
        "Delete a topic that nobody needs",
        "set-max-topics-per-namespace -t",
    ),
)


def limit_of(code: int, said: str) -> Limit | None:
    """Return the limit that a refusal names; ``None`` if it has another reason.

    Args:
        code: Number of ``ServerError``.
        said: The broker's text.
    """
    if code not in _CODES:
        return None
    return limit_in(said)


def limit_in(said: str) -> Limit | None:
    """Return the limit that a text of the broker names; ``None`` if it names none."""
    return next((limit for limit in _LIMITS if limit.sign in said), None)


def limit_reached(limit: Limit, failed: str, topic: str, why: str) -> LimitReachedError:
    """Create the error for a limit.

    Args:
        limit: The limit.
        failed: The failure, such as ``Could not subscribe to T``.
        topic: Full name of the topic or of the topic partition.
        why: Evidence that the limit is reached, such as the broker's text.
    """
    return LimitReachedError(
        f"{failed}: the limit {limit.setting} of the broker is reached ({why}). It counts "
        f"{limit.counted}.",
        f"{limit.fewer}, or {limit.remedy(namespace_of(topic))}.",
        limit=limit.setting,
        topic=topic,
    )


def limit_refused(limit: Limit, failed: str, topic: str, said: str) -> LimitReachedError:
    """Create the error for a limit from the broker's text, without its last full stop."""
    said = _JAVA_CLASS.sub("", said)
    return limit_reached(limit, failed, topic, f"the broker says: {said}")


# -- Limits of consumers, by their numbers ---------------------------------------------------------


class ConsumerLimits(NamedTuple):
    """Most consumers that the broker allows in one topic partition.

    0 for no limit, ``None`` if the role may not read it.
    """

    per_topic: int | None = 0
    per_subscription: int | None = 0

    @property
    def unknown(self) -> tuple[str, ...]:
        """Names of the limits that are not known."""
        limits = MAX_CONSUMERS_PER_TOPIC, MAX_CONSUMERS_PER_SUBSCRIPTION
        return tuple(
            limit.setting for limit, most in zip(limits, self, strict=True) if most is None
        )

    def exceeded(
        self, opens: int, subscription: str = "", connected: Mapping[str, int] = _NOBODY
    ) -> tuple[Limit, int] | None:
        """Return the known limit that more consumers would exceed, and its maximum, if any.

        Args:
            opens: Number of consumers to open in the topic partition.
            subscription: Their subscription.
            connected: Number of connected consumers, by subscription.
        """
        others = sum(connected.values())
        per_topic, per_subscription = (most or 0 for most in self)
        if 0 < per_topic < opens + others:
            return MAX_CONSUMERS_PER_TOPIC, per_topic
        if 0 < per_subscription < opens + connected.get(subscription, 0):
            return MAX_CONSUMERS_PER_SUBSCRIPTION, per_subscription
        return None
