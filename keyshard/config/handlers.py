"""How handlers are run: options of :meth:`keyshard.KeyShardSource.run`, validated at once."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal, TypedDict

from keyshard.config.field_types import short_repr
from keyshard.core.lanes.retrying import RetryPolicy
from keyshard.core.option_checks import (
    check_choice,
    check_integer,
    check_seconds,
    check_text,
    suggesting_options,
)
from keyshard.core.position.entry import full_topic_name
from keyshard.errors import ConfigError
from keyshard.redaction import shown

WORKERS_MAX = 256
"""Most worker threads, unless more are asked for."""


Executor = Literal["auto", "threads", "async", "processes"]
OnFailure = Literal["park", "dead_letter", "stop"]
NullKeys = Literal["spread", "serialise", "reject"]


@suggesting_options
@dataclass(frozen=True, kw_only=True, repr=False)
class HandlerConfig:
    """How the messages of a source reach a handler."""

    lanes: int = 16
    """Keys worked on at the same time in each range; 1 to 10,000."""
    workers: int | None = None
    """Threads or processes that run the handler, over all ranges; ``None``: for threads as many as
    all lanes, at most 256; for processes the number of cores. Of an ``async def``, it is how many
    run at the same time; ``None``: as many as all lanes. The consumers are where ``workers`` of
    the source says."""
    executor: Executor = "auto"
    """``threads``, ``async`` (for ``async def``) or ``processes`` (for CPU-bound functions);
    ``auto``: by the handler, threads or async."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    """When a failed message is tried again in its lane, and when no more."""
    on_failure: OnFailure = "park"
    """After the last attempt: ``park`` the key (this message and all later ones of the key go to
    the dead-letter topic, in order, until it is unparked), ``dead_letter`` (only this message
    does), or ``stop``. A message without a key parks no other."""
    null_keys: NullKeys = "spread"
    """Messages without a key: ``spread`` (no order), ``serialise`` (in order per range) or
    ``reject`` (to the dead-letter topic)."""
    dead_letter_topic: str | None = None
    """Default ``<first topic>-<subscription>-DLQ``; for a pattern ``<subscription>-DLQ`` in its
    namespace."""
    checkpoint: str | os.PathLike[str] | None = None
    """Path of the checkpoint, or its fsspec URL, such as ``s3://bucket/orders.json``; ``None``:
    what was completed in the moments before a crash may come again. The folder of a local file has
    to exist. Symbolic links are followed once, at the start."""
    drain_timeout_s: float = 30.0
    """Longest wait for running handlers at a stop or while a range moves, seconds."""
    metrics_port: int | None = None
    """Port that serves ``/metrics`` for Prometheus, ``/livez`` and ``/readyz``; ``None``: none."""
    metrics_host: str = "127.0.0.1"
    """Address of that port; ``0.0.0.0`` or ``::`` where others must reach it, as in a container."""

    def __post_init__(self) -> None:
        check_choice("executor", self.executor, "auto", "threads", "async", "processes")
        check_choice("on_failure", self.on_failure, "park", "dead_letter", "stop")
        check_choice("null_keys", self.null_keys, "spread", "serialise", "reject")
        check_integer("lanes", self.lanes, 1, 10_000)
        if isinstance(self.workers, str):
            raise ConfigError(
                f"workers is {shown(self.workers)}; it is how many handlers run at the same time, "
                "an integer from 1 to 10000. What has the consumers is workers of KeyShardSource."
            )
        if self.workers is not None:
            check_integer("workers", self.workers, 1, 10_000)
        if self.metrics_port is not None:
            check_integer("metrics_port", self.metrics_port, 0, 65_535)
        check_text("metrics_host", self.metrics_host, "give an address, such as '0.0.0.0'")
        if not isinstance(self.retry, RetryPolicy):
            raise ConfigError(f"retry is {shown(self.retry)}; give a keyshard.RetryPolicy.")
        check_seconds("drain_timeout_s", self.drain_timeout_s, 86_400)
        if self.checkpoint is not None:
            object.__setattr__(self, "checkpoint", checkpoint_url(self.checkpoint))
        if self.dead_letter_topic is not None:
            topic = check_text("dead_letter_topic", self.dead_letter_topic, "name a topic")
            object.__setattr__(self, "dead_letter_topic", full_topic_name(topic))

    def __repr__(self) -> str:
        return short_repr(self)


class HandlerOptions(TypedDict, total=False):
    """The fields of :class:`HandlerConfig`, so that editors know the options of ``run()``."""

    lanes: int
    workers: int | None
    executor: Executor
    retry: RetryPolicy
    on_failure: OnFailure
    null_keys: NullKeys
    dead_letter_topic: str | None
    checkpoint: str | os.PathLike[str] | None
    drain_timeout_s: float
    metrics_port: int | None
    metrics_host: str


def checkpoint_url(given: object) -> str:
    """Path or URL of a checkpoint, as a text.

    Raises:
        ConfigError: It is neither.
    """
    path = os.fspath(given) if isinstance(given, os.PathLike) else given
    return check_text("checkpoint", path, "give a path or fsspec URL of a file, or None")
