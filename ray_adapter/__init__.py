"""Ray on keyshard: jobs over what topics deliver, and datasets of what they hold.

Usage::

    import ray_adapter

    with ray_adapter.run(source, score, parallelism=10) as job:
        for result in job:
            store(result)

    yesterday = ray_adapter.read(source, start="2026-11-20", end="2026-11-21")
"""

from __future__ import annotations

from ray_adapter import ray_version

ray_version.check(ray_version.installed())  # else the next line fails in words of Python

from ray_adapter.job import Job, run  # noqa: E402
from ray_adapter.reading import read  # noqa: E402

__all__ = ["Job", "read", "run"]
