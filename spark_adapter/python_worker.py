"""Settings of a Python worker of Spark that runs a task of keyshard."""

from __future__ import annotations

import gc
import sys

from pyspark import TaskContext

FREEZES_MAX = 8
"""Most times that a worker exempts objects from collection."""

_frozen_at: list[int] = []
"""Number of imported modules at each time that this process exempted them."""


def exempt_imports() -> None:
    """Exempt imported modules from the garbage collection that Spark runs after every task.

    That collection visits every object of every module, which takes longer than a small task. Spark
    has collected the garbage of earlier tasks when a task begins, so only live objects are
    exempted. They are freed as before, unless they become part of a cycle. A later task repeats
    this if modules were imported since, at most :data:`FREEZES_MAX` times.

    Outside a task, this does nothing.
    """
    modules = len(sys.modules)
    if TaskContext.get() is None or len(_frozen_at) >= FREEZES_MAX:
        return
    if not _frozen_at or modules > _frozen_at[-1]:
        gc.freeze()
        _frozen_at.append(modules)
