"""Options of :meth:`keyshard.KeyShardSource.run`, validated on construction."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal, TypedDict

from keyshard.config.field_types import short_repr
from keyshard.core.lanes.retry_policy import RetryPolicy
from keyshard.core.option_checks import (
    check_bool,
    check_choice,
    check_integer,
    check_seconds,
    check_text,
    check_token,
    suggesting_options,
)
from keyshard.core.position.entry import full_topic_name
from keyshard.errors import ConfigError
from keyshard.redaction import shown

WORKERS_MAX = 256
"""Default limit of worker threads."""

RATE_LIMITS = (0.001, 1_000_000)
"""Least and most messages per second of a rate limit."""

Executor = Literal["auto", "threads", "async", "processes"]
OnFailure = Literal["park", "dead_letter", "stop"]
NullKeys = Literal["spread", "serialise", "reject"]


@suggesting_options
@dataclass(frozen=True, kw_only=True, repr=False)
class HandlerConfig:
    """Options of the run that calls a handler with the messages of a source."""

    lanes: int = 16
    """Keys that each range handles at the same time; 1 to 10,000."""
    workers: int | None = None
    """Threads or processes that run the handler, over all ranges. ``None``: for threads, the
    number of all lanes, at most 256; for processes, the number of cores. For an ``async def``:
    calls that run at the same time; ``None``: the number of all lanes. The place of the
    consumers is ``workers`` of the source."""
    executor: Executor = "auto"
    """``threads``, ``async`` (for ``async def``) or ``processes`` (for CPU-bound functions).
    ``auto``: threads or async, depending on the handler."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    """Retry policy of a failed message in its lane."""
    on_failure: OnFailure = "park"
    """Action after the last attempt. ``park`` the key: this message and all later ones of the
    key go to the dead-letter topic, in order, until the key is unparked. ``dead_letter``: only
    this message does. ``stop``: the source ends. A message without a key parks no other message."""
    rate_limit: float | None = None
    """Most calls of the handler per second, over all ranges, wherever their consumers run. Retries
    and replays count. ``None``: no limit. 0.001 to 1,000,000."""
    rate_burst: int | None = None
    """Most calls that ``rate_limit`` lets begin at once after a pause. ``None``: those of 0.1 s, at
    least 1."""
    null_keys: NullKeys = "spread"
    """Messages without a key: ``spread`` (no order), ``serialise`` (in order per range) or
    ``reject`` (to the dead-letter topic)."""
    dead_letter_topic: str | None = None
    """Default: ``<first topic>-<subscription>-DLQ``; for a pattern ``<subscription>-DLQ`` in its
    namespace."""
    checkpoint: str | os.PathLike[str] | None = None
    """Path of the checkpoint, or its fsspec URL, such as ``s3://bucket/orders.json``. ``None``:
    messages that were completed just before a crash may come again. The folder of a local file
    must exist. Symbolic links are resolved once, at the start."""
    drain_timeout_s: float = 30.0
    """Longest wait for running handlers at a stop or while a range moves, seconds."""
    metrics_port: int | None = None
    """Port that serves ``/metrics`` for Prometheus, ``/livez`` and ``/readyz``; ``None``: no
    server."""
    metrics_host: str = "127.0.0.1"
    """Address that the server binds. Use ``0.0.0.0`` or ``::`` if other machines must reach it,
    as in a container."""
    telemetry: bool = False
    """Whether each attempt is a span of OpenTelemetry, linked to the span of the producer, and
    outputs carry a context. Needs ``keyshard[otel]``. ``telemetry`` of the source does the same."""
    ui_port: int | None = None
    """Port that serves the page of this source; ``None``: no page. Needs ``keyshard[ui]``."""
    ui_host: str = "127.0.0.1"
    """Address that the page binds. If other machines can reach it, ``ui_token`` is required."""
    ui_token: str | None = None
    """Token that a browser has to give, at least 16 characters. ``None``: each user of this
    machine can open the page of a loopback address."""

    def __post_init__(self) -> None:
        check_choice("executor", self.executor, "auto", "threads", "async", "processes")
        check_choice("on_failure", self.on_failure, "park", "dead_letter", "stop")
        check_choice("null_keys", self.null_keys, "spread", "serialise", "reject")
        check_integer("lanes", self.lanes, 1, 10_000)
        if isinstance(self.workers, str):
            raise ConfigError(
                f"workers is {shown(self.workers)}; it must be an integer from 1 to 10000, the "
                "number of concurrent handlers.",
                "The option workers of KeyShardSource is the place of the consumers.",
            )
        if self.workers is not None:
            check_integer("workers", self.workers, 1, 10_000)
        check_rate(self.rate_limit, self.rate_burst)
        if self.metrics_port is not None:
            check_integer("metrics_port", self.metrics_port, 0, 65_535)
        check_bool("telemetry", self.telemetry)
        if self.ui_port is not None:
            check_integer("ui_port", self.ui_port, 0, 65_535)
        check_text("ui_host", self.ui_host, "Write an address, such as '0.0.0.0'.")
        if self.ui_token is not None:
            check_token("ui_token", self.ui_token)
        check_text("metrics_host", self.metrics_host, "Write an address, such as '0.0.0.0'.")
        if not isinstance(self.retry, RetryPolicy):
            raise ConfigError(f"retry is {shown(self.retry)}; it must be a keyshard.RetryPolicy.")
        check_seconds("drain_timeout_s", self.drain_timeout_s, 86_400)
        if self.checkpoint is not None:
            object.__setattr__(self, "checkpoint", checkpoint_url(self.checkpoint))
        if self.dead_letter_topic is not None:
            topic = check_text("dead_letter_topic", self.dead_letter_topic, "Name a topic.")
            object.__setattr__(self, "dead_letter_topic", full_topic_name(topic))

    @property
    def writes_dead_letters(self) -> bool:
        """Whether messages become dead letters although no handler rejects them."""
        return self.on_failure != "stop" or self.null_keys == "reject"

    def __repr__(self) -> str:
        return short_repr(self, never=("ui_token",))


class HandlerOptions(TypedDict, total=False):
    """The fields of :class:`HandlerConfig`, so that editors know the options of ``run()``."""

    lanes: int
    workers: int | None
    executor: Executor
    retry: RetryPolicy
    on_failure: OnFailure
    rate_limit: float | None
    rate_burst: int | None
    null_keys: NullKeys
    dead_letter_topic: str | None
    checkpoint: str | os.PathLike[str] | None
    drain_timeout_s: float
    metrics_port: int | None
    metrics_host: str
    telemetry: bool
    ui_port: int | None
    ui_host: str
    ui_token: str | None


def check_rate(rate: float | None, burst: int | None) -> None:
    """Check ``rate_limit`` and ``rate_burst``.

    Raises:
        ConfigError: One of them is wrong, or there is a burst without a limit.
    """
    low, high = RATE_LIMITS
    if burst is not None:
        check_integer("rate_burst", burst, 1, 1_000_000)
    if rate is None:
        if burst is not None:
            raise ConfigError("rate_burst is given without rate_limit.", "Set both.")
    elif type(rate) not in (int, float) or not low <= rate <= high:
        raise ConfigError(
            f"rate_limit is {shown(rate)}; it must be a number of messages per second from "
            f"{low:g} to {high:,}."
        )


def checkpoint_url(given: object) -> str:
    """Return the path or URL of a checkpoint as a text.

    Raises:
        ConfigError: The value is neither.
    """
    path = os.fspath(given) if isinstance(given, os.PathLike) else given
    return check_text("checkpoint", path, "Write a path or an fsspec URL of a file, or None.")
