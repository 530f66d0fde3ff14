"""Which topic holds the dead letters of a source: it must not change while letters rest in it.

The first of these that says it:

    1. the user      ``dead_letter_topic``
    2. checkpoint    the topic that it was written with
    3. the letters   of the default names, one for each topic, that which has parked letters
    4. the default   named after the first topic

So a topic that is added in front of the others, which changes the default, does not hide letters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keyshard.broker.port import Admin, Broker
from keyshard.broker.retry import retry_until
from keyshard.config.source import SourceConfig
from keyshard.coordinator.topics import PARKED
from keyshard.core.position.entry import TopicPartition
from keyshard.core.topic_pattern import TopicPattern
from keyshard.dead_letter.reading import has_parked
from keyshard.errors import ConfigError, TopicNotFoundError


def check_dead_letter_topic(config: SourceConfig, named: str | None) -> None:
    """Refuse a dead-letter topic that the source consumes.

    Raises:
        ConfigError: It does.
    """
    pattern = None if config.topics_pattern is None else TopicPattern.parse(config.topics_pattern)
    topic = named or config.default_dead_letter_topics[0]
    if topic in config.topics or (pattern is not None and pattern.matches(topic)):
        raise ConfigError(
            f"dead_letter_topic is {topic}, which this source consumes: its dead letters would "
            "become dead letters again. Name another topic."
        )


def find_dead_letter_topic(
    broker: Broker,
    admin: Admin | None,
    config: SourceConfig,
    named: str | None,
    known: Mapping[str, Any] | None,
) -> tuple[str, Mapping[str, Any] | None]:
    """The dead-letter topic of a source that starts, and what a checkpoint knows of it.

    Args:
        broker: Connection to look through.
        admin: Admin REST interface, where there is one.
        config: The source.
        named: What the user named.
        known: Part of the checkpoint about parked keys.

    Raises:
        ConfigError: Letters rest in another topic than the user named, or in several.
        BrokerError: The broker cannot be reached, or refused.
    """
    saved = None if known is None else known.get("topic")
    if named is not None:
        if saved in (None, named):
            return named, known
        if known is not None and known.get("oldest") is not None:
            raise ConfigError(
                f"dead_letter_topic is {named}, and dead letters of parked keys rest in {saved}, "
                "as the checkpoint says. Name that one, or let its keys out first (keyshard unpark "
                "--all)."
            )
        return named, None
    if saved is not None:
        return saved, known
    names = config.default_dead_letter_topics
    if len(names) == 1:
        return names[0], known
    holding = [name for name in names if _holds(broker, admin, config, TopicPartition(name))]
    if len(holding) > 1:
        raise ConfigError(
            f"Dead letters of parked keys of {config.subscription!r} rest in "
            f"{' and '.join(holding)}, and a source has one dead-letter topic. Run it with "
            "dead_letter_topic set to each of them in turn, let its keys out (keyshard unpark "
            "--all), and then without."
        )
    return (holding or names)[0], known


def _holds(
    broker: Broker, admin: Admin | None, config: SourceConfig, where: TopicPartition
) -> bool:
    if admin is None:
        timeout_s = config.operation_timeout_ms / 1000
        if retry_until(lambda: broker.missing([where.topic]), timeout_s):
            return False
    elif f"{config.subscription}{PARKED}" not in admin.subscriptions(where):
        return False
    try:
        return has_parked(broker, where, config)
    except TopicNotFoundError:
        return False
