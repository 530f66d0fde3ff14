"""Opens the dead-letter topic of a source that starts: who is parked, and what is finished with."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from keyshard.broker.port import Broker
from keyshard.broker.retry import retry_until
from keyshard.config.source import SourceConfig
from keyshard.core.dead_letter.parked import Parked
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.dead_letter.dead_letters import DeadLetters
from keyshard.dead_letter.keeper import LetterKeeper
from keyshard.dead_letter.reading import fold
from keyshard.errors import KeyShardError, RangeConflictError

_log = logging.getLogger(__name__)


def open_dead_letters(
    broker: Broker,
    topic: str,
    config: SourceConfig,
    parked: Mapping[str, Any] | None = None,
    *,
    checkpointed: bool = False,
    fail: Callable[[KeyShardError], None],
) -> DeadLetters:
    """Hold the parked letters of a source, and know which keys are parked.

    Call it when the ranges are subscribed and before the first receive: whoever held them before
    can write no letter any more that counts.

    Args:
        broker: Connection to write and read through.
        topic: Full name of the dead-letter topic; a missing one is created for the first letter.
        config: The source.
        parked: What :meth:`DeadLetters.checkpoint` gave; ``None``: the whole topic is read.
        checkpointed: Whether :meth:`DeadLetters.checkpoint` will be stored.
        fail: Told of an unexpected error of a thread, which ends the source.

    Raises:
        ConfigError: The topic is partitioned.
        CheckpointError: What the checkpoint says of parked keys cannot be read.
        SubscriptionInUseError: Another source parks there as the same subscription.
        ReplayTimeoutError: The topic could not be read before ``replay_timeout_ms``.
        BrokerError: The broker cannot be reached, or refused.
    """
    timeout_s = config.operation_timeout_ms / 1000
    where = TopicPartition(topic)
    keeper = LetterKeeper(broker, where, config)
    stored = None if parked is None else Parked.from_dict(parked)
    # A checkpoint that knows of a resting letter has lost it where there is no topic.
    rests = stored is not None and stored.claimed is not None
    if not rests and retry_until(keeper.is_missing, timeout_s):
        return DeadLetters(
            broker, where, config, keeper, Parked(), checkpointed=checkpointed, fail=fail
        )
    try:
        consumer = retry_until(keeper.hold, config.subscribe_timeout_ms / 1000)
    except RangeConflictError as exc:
        raise keeper.in_use() from exc

    def folded() -> tuple[Parked, list[EntryId]]:
        state = Parked() if parked is None else Parked.from_dict(parked)
        return state, fold(broker, where, state, consumer, config)

    try:
        replay_s = config.replay_timeout_ms / 1000
        state, finished = retry_until(folded, replay_s)
    except BaseException:
        keeper.close()
        raise
    letters = DeadLetters(
        broker, where, config, keeper, state,
        checkpointed=checkpointed, stored=stored.begin if stored is not None else None, fail=fail,
    )  # fmt: skip
    letters.finished.markers(finished)
    if state.claimed is not None:
        letters.note()
    if state.keys:
        _log.warning(
            "%d keys of %r are parked in %s, %s first; source.unpark(key) lets a key out",
            len(state.keys), config.subscription, topic, next(iter(state.keys)),
        )  # fmt: skip
    return letters
