"""How handlers are run: options of :meth:`keyshard.KeyShardSource.run`, validated at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypedDict

from keyshard.core.entry import full_topic_name
from keyshard.core.retrying import RetryPolicy
from keyshard.errors import ConfigError

WORKERS_MAX = 256
"""Most worker threads, unless more are asked for."""


@dataclass(frozen=True, kw_only=True)
class HandlerConfig:
    """How the messages of a source reach a handler."""

    lanes: int = 16
    """Keys worked on at the same time in each range; 1 to 10,000."""
    workers: int | None = None
    """Threads or processes that run the handler, over all ranges; ``None``: for threads as many as
    all lanes, at most 256; for processes the number of cores. Coroutines need none."""
    executor: str = "auto"
    """``threads``, ``async`` (for ``async def``) or ``processes`` (for CPU-bound functions);
    ``auto``: by the handler, threads or async."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    """When a failed message is tried again in its lane, and when no more."""
    on_failure: str = "park"
    """After the last attempt: ``park`` the key (this message and all later ones of the key go to
    the dead-letter topic, in order, until it is unparked), ``dead_letter`` (only this message
    does), or ``stop``. A message without a key parks no other."""
    null_keys: str = "spread"
    """Messages without a key: ``spread`` (no order), ``serialise`` (in order per range) or
    ``reject`` (to the dead-letter topic)."""
    dead_letter_topic: str | None = None
    """Default ``<first topic>-<subscription>-DLQ``; for a pattern ``<subscription>-DLQ`` in its
    namespace."""
    checkpoint: str | None = None
    """fsspec URL of the checkpoint, such as ``file:///var/lib/app/orders.json``; ``None``: what was
    completed in the moments before a crash may come again."""
    drain_timeout_s: float = 30.0
    """Longest wait for running handlers at a stop or while a range moves, seconds."""
    metrics_port: int | None = None
    """Port that serves ``/metrics`` for Prometheus, ``/livez`` and ``/readyz``; ``None``: none."""
    metrics_host: str = "127.0.0.1"
    """Address of that port; ``0.0.0.0`` or ``::`` where others must reach it, as in a container."""

    def __post_init__(self) -> None:
        _choice("executor", self.executor, "auto", "threads", "async", "processes")
        _choice("on_failure", self.on_failure, "park", "dead_letter", "stop")
        _choice("null_keys", self.null_keys, "spread", "serialise", "reject")
        _number("lanes", self.lanes, 1, 10_000)
        if self.workers is not None:
            _number("workers", self.workers, 1, 10_000)
        if self.metrics_port is not None:
            _number("metrics_port", self.metrics_port, 0, 65_535)
        if not isinstance(self.metrics_host, str) or not self.metrics_host:
            raise ConfigError(
                f"metrics_host is {self.metrics_host!r}; give an address, such as '0.0.0.0'."
            )
        if not isinstance(self.retry, RetryPolicy):
            raise ConfigError(f"retry is {self.retry!r}; give a keyshard.RetryPolicy.")
        if not 0 <= self.drain_timeout_s <= 86_400:
            raise ConfigError(
                f"drain_timeout_s is {self.drain_timeout_s!r}; it must be 0 to 86,400 seconds."
            )
        if self.dead_letter_topic is not None:
            object.__setattr__(self, "dead_letter_topic", full_topic_name(self.dead_letter_topic))


class HandlerOptions(TypedDict, total=False):
    """The fields of :class:`HandlerConfig`, so that editors know the options of ``run()``."""

    lanes: int
    workers: int | None
    executor: str
    retry: RetryPolicy
    on_failure: str
    null_keys: str
    dead_letter_topic: str | None
    checkpoint: str | None
    drain_timeout_s: float
    metrics_port: int | None
    metrics_host: str


def _choice(name: str, value: object, *choices: str) -> None:
    if value not in choices:
        wanted = ", ".join(map(repr, choices[:-1])) + f" or {choices[-1]!r}"
        raise ConfigError(f"{name} is {value!r}; write {wanted}.")


def _number(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ConfigError(f"{name} is {value!r}; it must be an integer from {low} to {high}.")
