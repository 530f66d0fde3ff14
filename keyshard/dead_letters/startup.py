"""Opens the dead-letter topic of a source that starts, and finds its parked keys."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from keyshard.broker.admin.port import Admin
from keyshard.broker.port import Broker
from keyshard.broker.retry import retry_until
from keyshard.broker.topics import PARKED
from keyshard.config.source import SourceConfig
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.topic_pattern import TopicPattern
from keyshard.dead_letters.browser import DeadLetterBrowser
from keyshard.dead_letters.parking import ParkedKeys
from keyshard.dead_letters.replay import DeadLetterReader
from keyshard.dead_letters.store import DeadLetterStore
from keyshard.dead_letters.subscription import DeadLetterSubscription
from keyshard.dead_letters.topic_scan import Check, fold, is_needed, stored_state
from keyshard.dead_letters.topic_state import TopicState
from keyshard.errors import (
    BrokerError,
    ConfigError,
    KeyShardError,
    RangeConflictError,
    RuntimeStoppedError,
    TopicNotFoundError,
)

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


def open_dead_letters(
    broker: Broker,
    topic: str,
    config: SourceConfig,
    parked: Mapping[str, Any] | None = None,
    *,
    checkpointed: bool = False,
    needed: bool = True,
    admin: Admin | None = None,
    fail: Callable[[KeyShardError], None],
    check: Callable[[], None] = is_needed,
) -> DeadLetterStore:
    """Subscribe to the dead-letter topic of a source, and find its parked keys.

    Call it after the ranges are subscribed and before the first receive: then the previous owner of
    the ranges can write no more dead letters that count.

    Args:
        broker: Connection to write and read through.
        topic: Full name of the dead-letter topic; a missing one is created for the first dead
            letter.
        config: Options of the source.
        parked: Result of :meth:`DeadLetterStore.checkpoint`; ``None``: the whole topic is read.
        checkpointed: Whether :meth:`DeadLetterStore.checkpoint` will be stored.
        needed: Whether to check now that the broker can create a missing topic. If false, the first
            dead letter fails if the broker cannot.
        admin: Admin interface; ``None``: none.
        fail: Called with an unexpected error of a thread, which ends the source.
        check: Called before each request; raises a ``KeyShardError`` if the source has ended.

    Raises:
        RuntimeStoppedError: ``check`` raised.
        ConfigError: The topic is partitioned.
        TopicNotFoundError, SubscriptionNotFoundError: The topic or its subscription is missing, and
            the broker does not create it.
        CheckpointError: The checkpoint's part about parked keys cannot be read.
        SubscriptionInUseError: Another source parks there with the same subscription.
        ReplayTimeoutError: The topic could not be read within ``replay_timeout_ms``.
        BrokerError: The broker cannot be reached, or refused.
    """
    timeout_s, check_source = config.operation_timeout_ms / 1000, _unless_ended(check)

    def retried(request: Callable[[], _Result], longest_s: float = timeout_s) -> _Result:
        def checked() -> _Result:
            check_source()
            return request()

        return retry_until(checked, longest_s)

    where = TopicPartition(topic)
    keeper = DeadLetterSubscription(broker, where, config)
    stored = None if parked is None else TopicState.from_dict(parked)
    # If the checkpoint names a resting dead letter, a missing topic means that it was lost.
    rests = stored is not None and stored.claimed is not None
    if not rests and retried(keeper.is_missing):
        if needed:
            retried(lambda: keeper.check_creation(admin))
        return DeadLetterStore(
            broker, where, config, keeper, TopicState(),
            checkpointed=checkpointed, admin=admin, fail=fail,
        )  # fmt: skip
    try:
        consumer = retried(keeper.hold, config.subscribe_timeout_ms / 1000)
    except RangeConflictError as exc:
        raise keeper.in_use() from exc

    def folded() -> tuple[TopicState, list[EntryId]]:
        state = TopicState() if parked is None else TopicState.from_dict(parked)
        return state, fold(broker, where, state, consumer, config, check=check_source)

    try:
        state, finished = retried(folded, config.replay_timeout_ms / 1000)
    except BaseException:
        with suppress(BrokerError):
            keeper.close()
        raise
    dead_letters = DeadLetterStore(
        broker, where, config, keeper, state,
        checkpointed=checkpointed, stored=stored.begin if stored is not None else None,
        admin=admin, fail=fail,
    )  # fmt: skip
    dead_letters.finished.markers(finished)
    if state.claimed is not None:
        dead_letters.note()
    if state.keys:
        _log.warning(
            "%d keys of %r are parked in %s, first %s; source.unpark(key) unparks a key",
            len(state.keys), config.subscription, topic, next(iter(state.keys)),
        )  # fmt: skip
    return dead_letters


# -- The topic with the dead letters of a source ---------------------------------------------------
# It must not change while dead letters rest in it. The first of these that names a topic:
#
#     1. the user         ``dead_letter_topic``
#     2. the checkpoint   the topic that it was written with
#     3. dead letters     each consumed topic has a default name: the one with parked dead letters
#     4. the default      named after the first topic
#
# So a topic that is added before the others changes the default, but hides no dead letters.


def check_dead_letter_topic(config: SourceConfig, named: str | None) -> None:
    """Refuse a dead-letter topic that the source itself consumes.

    Raises:
        ConfigError: The source consumes it.
    """
    pattern = None if config.topics_pattern is None else TopicPattern.parse(config.topics_pattern)
    topic = named or config.default_dead_letter_topics[0]
    if topic in config.topics or (pattern is not None and pattern.matches(topic)):
        raise ConfigError(
            f"dead_letter_topic is {topic}, which this source consumes, so its dead letters would "
            "become dead letters again.",
            "Name another topic.",
        )


def find_dead_letter_topic(
    broker: Broker,
    admin: Admin | None,
    config: SourceConfig,
    named: str | None,
    known: Mapping[str, Any] | None,
    *,
    check: Callable[[], None] = is_needed,
) -> tuple[str, Mapping[str, Any] | None]:
    """Return the dead-letter topic of a source that starts, and the checkpoint's part about it.

    Args:
        broker: Connection to look through.
        admin: Admin REST interface; ``None``: none.
        config: Options of the source.
        named: Topic that the user named.
        known: Part of the checkpoint about parked keys.
        check: As for :func:`open_dead_letters`.

    Raises:
        RuntimeStoppedError: ``check`` raised.
        ConfigError: Dead letters rest in another topic than the named one, or in several.
        BrokerError: The broker cannot be reached, or refused.
    """
    saved = None if known is None else known.get("topic")
    if named is not None:
        if saved in (None, named):
            return named, known
        if known is not None and known.get("oldest") is not None:
            raise ConfigError(
                f"dead_letter_topic is {named}, but the checkpoint has dead letters of parked "
                f"keys in {saved}.",
                "Use that topic, or first unpark its keys (keyshard dead-letters replay --all).",
            )
        return named, None
    if saved is not None:
        return saved, known
    names = config.default_dead_letter_topics
    if len(names) == 1:
        return names[0], known
    holding = [
        name
        for name in names
        if _holds(broker, admin, config, TopicPartition(name), check=_unless_ended(check))
    ]
    if len(holding) > 1:
        raise ConfigError(
            f"Dead letters of parked keys of {config.subscription!r} are in "
            f"{' and '.join(holding)}, but a source has one dead-letter topic.",
            "Run the source once with each of them as dead_letter_topic, and unpark its keys "
            "(keyshard dead-letters replay --all).",
        )
    return (holding or names)[0], known


def _unless_ended(check: Callable[[], None]) -> Check:
    """Wrap a check: raise ``RuntimeStoppedError``, which is not retried, for each of its errors."""

    def checked() -> None:
        try:
            check()
        except KeyShardError as exc:
            raise RuntimeStoppedError(
                f"The source ended before its dead letters were read: {exc.problem}", exc.remedy
            ) from exc

    return checked


def _holds(
    broker: Broker,
    admin: Admin | None,
    config: SourceConfig,
    where: TopicPartition,
    *,
    check: Check,
) -> bool:
    if admin is None:
        timeout_s = config.operation_timeout_ms / 1000
        if retry_until(lambda: broker.missing([where.topic]), timeout_s):
            return False
    elif f"{config.subscription}{PARKED}" not in admin.subscriptions(where):
        return False
    try:
        return bool(stored_state(broker, where, config, check=check).keys)
    except TopicNotFoundError:
        return False


# -- Dead letters of a source that does not run here -----------------------------------------------


def open_browser(
    broker: Broker, admin: Admin | None, config: SourceConfig, topic: str | None = None
) -> DeadLetterBrowser:
    """Open the dead letters of a source to read them only; the source may run meanwhile.

    Later dead letters are not seen.

    Args:
        broker: Connection to read through.
        admin: Admin REST interface; ``None``: none.
        config: Options of the source.
        topic: Full name of the dead-letter topic; ``None``: the one that the source would use.

    Raises:
        ConfigError: Dead letters rest in several topics.
        ReplayTimeoutError: Nothing came for ``replay_timeout_ms``.
        BrokerError: The broker cannot be reached, or refused.
    """
    found, _ = find_dead_letter_topic(broker, admin, config, topic, None)
    where = TopicPartition(found)
    timeout_s = config.operation_timeout_ms / 1000
    is_missing = retry_until(lambda: broker.missing([found]), timeout_s)
    state = TopicState() if is_missing else stored_state(broker, where, config)
    keys, last = ParkedKeys(state), state.last
    reader = DeadLetterReader(broker, where, keys, config.replay_timeout_ms / 1000)
    return DeadLetterBrowser(reader, keys, config.subscription, lambda: last, admin)
