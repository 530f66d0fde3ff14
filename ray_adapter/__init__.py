"""Ray on keyshard: jobs over streams, datasets read and written, workers of a source.

Usage::

    import ray_adapter

    with ray_adapter.run(source, score, parallelism=10) as job:
        for result in job:
            store(result)

    yesterday = ray_adapter.read(source, start="2026-11-20", end="2026-11-21")
    ray_adapter.write(scores, KeyShardSink("scores"))

    source = KeyShardSource("orders", workers=ray_adapter.workers(4))

Names are imported at their first use, so that actors import only what they run.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from keyshard.version import check_version

if TYPE_CHECKING:
    from ray_adapter.job import Job, run
    from ray_adapter.read_reports import ReadReports
    from ray_adapter.reading import read
    from ray_adapter.worker_actors import workers
    from ray_adapter.writing import write

try:
    _found: str | None = version("ray")
except PackageNotFoundError:
    _found = None
check_version("Ray", _found, (2, 50), "keyshard[ray]")  # clearer than a failed import

__all__ = ["Job", "ReadReports", "read", "run", "workers", "write"]
_MODULES = {
    "Job": "ray_adapter.job", "ReadReports": "ray_adapter.read_reports",
    "read": "ray_adapter.reading", "run": "ray_adapter.job",
    "workers": "ray_adapter.worker_actors", "write": "ray_adapter.writing",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
