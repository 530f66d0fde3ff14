"""Options of :func:`ray_adapter.run`, validated on construction."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from keyshard.config.handlers import check_rate, checkpoint_url
from keyshard.core.lanes.retry_policy import RetryPolicy
from keyshard.core.option_checks import check_choice, check_integer, check_seconds
from keyshard.errors import ConfigError
from keyshard.redaction import shown

Takes = Literal["messages", "arrow"]
ACTORS_MAX = 10_000
PLACEMENT = ("num_cpus", "num_gpus", "resources", "scheduling_strategy", "runtime_env")
"""Options with Ray's names, which apply to each actor."""


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Options of a Ray job."""

    parallelism: int
    """Number of actors, each with an equal part of the ring; 1 to 10,000."""
    takes: Takes = "messages"
    """Argument of the handler: ``messages`` for each :class:`keyshard.Message`, or ``arrow`` for a
    ``pyarrow.RecordBatch``.
    """
    max_rows: int = 1_000
    """Most rows of one call of an actor, unless one entry has more."""
    max_wait_s: float = 0.02
    """Longest wait of an idle actor for more rows after the first, seconds."""
    checkpoint: str | os.PathLike[str] | None = None
    """Path or fsspec URL of the checkpoint; ``None`` for no checkpoint.

    Without one, messages that were not acknowledged are delivered again after a crash, and the last
    acknowledged ones too.
    """
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    """When to retry a failed message in place, and when to give up and end the job."""
    rate_limit: float | None = None
    """Most messages that actors get per second, over all of them. ``None``: no limit."""
    rate_burst: int | None = None
    """Most messages that they get at once after a pause. ``None``: those of 0.1 s, at least 1."""
    num_cpus: float | None = None
    """CPUs of each actor; ``None`` for Ray's default, as for the next four options."""
    num_gpus: float | None = None
    resources: Mapping[str, float] | None = None
    """Custom resources of each actor."""
    scheduling_strategy: Any = None
    """``DEFAULT``, ``SPREAD``, or one of Ray's objects, such as for a placement group."""
    runtime_env: Mapping[str, Any] | None = None
    """Ray's runtime environment, such as ``{"working_dir": "."}``."""
    start_timeout_s: float = 60.0
    """Longest wait until actors are placed and have loaded the handler, seconds."""
    drain_timeout_s: float = 30.0
    """Longest wait for actors to finish their rows at a drain or rescale, seconds."""

    def __post_init__(self) -> None:
        check_integer("parallelism", self.parallelism, 1, ACTORS_MAX)
        check_choice("takes", self.takes, "messages", "arrow")
        check_integer("max_rows", self.max_rows, 1, 10**7)
        check_seconds("max_wait_s", self.max_wait_s, 3_600)
        check_seconds("start_timeout_s", self.start_timeout_s, 86_400)
        check_seconds("drain_timeout_s", self.drain_timeout_s, 86_400)
        check_rate(self.rate_limit, self.rate_burst)
        if not isinstance(self.retry, RetryPolicy):
            raise ConfigError(f"retry is {shown(self.retry)}; it must be a keyshard.RetryPolicy.")
        if self.checkpoint is not None:
            object.__setattr__(self, "checkpoint", checkpoint_url(self.checkpoint))
        for name in ("num_cpus", "num_gpus"):
            value = getattr(self, name)
            if value is not None:
                _check_amount(name, value)
        for name in ("resources", "runtime_env"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Mapping):
                raise ConfigError(
                    f"{name} is {shown(value)}; it must be a dict of resources, as in Ray."
                )
        for name, value in (self.resources or {}).items():
            _check_amount(f"resources[{name!r}]", value)

    @property
    def placement(self) -> dict[str, Any]:
        """Return Ray's options for each actor."""
        given = {name: getattr(self, name) for name in PLACEMENT}
        return {
            name: dict(value) if isinstance(value, Mapping) else value
            for name, value in given.items()
            if value is not None
        }

    @property
    def amounts(self) -> dict[str, float]:
        """Return the resources of each actor, under the names of Ray's cluster."""
        named = {"CPU": self.num_cpus, "GPU": self.num_gpus}
        return {
            **{name: value for name, value in named.items() if value is not None},
            **(self.resources or {}),
        }


def _check_amount(name: str, value: object) -> None:
    if type(value) not in (int, float) or not 0 <= value < math.inf:  # type: ignore[operator]
        raise ConfigError(f"{name} is {shown(value)}; it must be a number, 0 or more.")
