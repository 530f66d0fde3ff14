"""Ray jobs on keyshard.

Usage::

    import ray_adapter

    with ray_adapter.run(source, score, parallelism=10) as job:
        for result in job:
            store(result)
"""

from __future__ import annotations

from ray_adapter import ray_version

ray_version.check(ray_version.installed())  # else the next line fails in words of Python

from ray_adapter.job import Job, run  # noqa: E402

__all__ = ["Job", "run"]
