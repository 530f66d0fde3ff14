"""Ray on keyshard: jobs over what topics deliver, datasets of what they hold, workers of a source.

Usage::

    import ray_adapter

    with ray_adapter.run(source, score, parallelism=10) as job:
        for result in job:
            store(result)

    yesterday = ray_adapter.read(source, start="2026-11-20", end="2026-11-21")

    source = KeyShardSource("orders", workers=ray_adapter.workers(4))

What is here is imported when it is asked for: actors import only what they run.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ray_adapter import ray_version

if TYPE_CHECKING:
    from ray_adapter.hosting import workers
    from ray_adapter.job import Job, run
    from ray_adapter.reading import read

ray_version.check(ray_version.installed())  # else later imports fail in words of Python

__all__ = ["Job", "read", "run", "workers"]
_MODULES = {
    "Job": "ray_adapter.job", "read": "ray_adapter.reading", "run": "ray_adapter.job",
    "workers": "ray_adapter.hosting",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
