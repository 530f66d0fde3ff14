"""Commands that create topics and subscriptions where a broker does not create them by itself."""

from __future__ import annotations

from collections.abc import Iterable
from shlex import quote

from keyshard.errors import ConfigError, SubscriptionNotFoundError, TopicNotFoundError


def create_topic(topic: str) -> str:
    """Return the command that creates a topic without partitions, or a scalable topic."""
    if topic.startswith("topic://"):
        return f"pulsar-admin scalable-topics create {quote(topic)}"
    return f"pulsar-admin topics create {quote(topic)}"


def create_or_correct(topic: str) -> str:
    """Return the remedy for a topic, or a partition of a topic, that does not exist."""
    whole, separator, number = topic.rpartition("-partition-")
    command = create_topic(topic)
    if separator and number.isdecimal():
        command = f"pulsar-admin topics create-missed-partitions {quote(whole)}"
    return f"Create the topic ({command}), or correct its name."


def create_subscription(topic: str, subscription: str, start: str = "earliest") -> str:
    """Return the command that creates a subscription; ``start`` is ``earliest`` or ``latest``."""
    return (
        f"pulsar-admin topics create-subscription --subscription {quote(subscription)} "
        f"--messageId {start} {quote(topic)}"
    )


def dead_letter_topic_missing(topic: str) -> TopicNotFoundError:
    """Create the error for a dead-letter topic that the broker does not create."""
    return TopicNotFoundError(
        f"The dead-letter topic {topic} does not exist, and the broker does not create it, "
        "because auto-creation of topics is off (allowAutoTopicCreation), or its namespace does "
        "not exist.",
        f"Run: {create_topic(topic)}",
        topic=topic,
    )


def dead_letter_topic_partitioned(topic: str) -> ConfigError:
    """Create the error for a dead-letter topic with partitions."""
    return ConfigError(
        f"The dead-letter topic {topic} is partitioned, but dead letters need one order.",
        "Set dead_letter_topic to a topic without partitions; a missing one is created without. "
        "If this one is empty, you can also delete it: pulsar-admin topics "
        f"delete-partitioned-topic {quote(topic)}",
    )


def subscriptions_missing(
    topics: Iterable[str], subscription: str, start: str = "earliest"
) -> SubscriptionNotFoundError:
    """Create the error for subscriptions of topics that the broker does not create.

    Args:
        topics: Full names, at least one.
        subscription: Name of the subscription.
        start: Its start, ``earliest`` or ``latest``.
    """
    names = sorted(set(topics))
    commands = "; ".join(create_subscription(name, subscription, start) for name in names)
    return SubscriptionNotFoundError(
        f"Subscription {subscription!r} of {' and '.join(names)} does not exist, and "
        "auto-creation of subscriptions is off (allowAutoSubscriptionCreation), so the broker "
        "does not create it.",
        f"Run: {commands}",
        topics=names,
        subscription=subscription,
    )


def dead_letter_subscription_missing(
    topic: str, subscription: str, *, topic_is_missing: bool
) -> SubscriptionNotFoundError:
    """Create the error for the subscription of a dead-letter topic."""
    commands = create_subscription(topic, subscription)
    if topic_is_missing:
        commands = f"{create_topic(topic)}; {commands}"
    return SubscriptionNotFoundError(
        f"Subscription {subscription!r} of the dead-letter topic {topic} does not exist, and "
        "auto-creation of subscriptions is off (allowAutoSubscriptionCreation), so the broker "
        "does not create it.",
        f"Run: {commands}",
        topics=[topic],
        subscription=subscription,
    )
