"""Runs tests in forks of a process that has imported all packages except keyshard.

Each line of its input is a JSON object: ``arguments`` for pytest, ``output`` the file for what it
prints, ``seconds`` that it may take, and ``deadline_s`` of the waits of tests. The answer is a line
with its exit code.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys

import pytest

NEEDED = (
    "asyncio", "concurrent.futures", "greenlet", "httpx", "hypothesis", "hypothesis.stateful",
    "mmh3", "multiprocessing.pool", "pandas", "psutil", "pulsar", "pyarrow", "pyarrow.parquet",
    "pyspark.sql.datasource", "pyspark.sql.types", "tenacity",
)  # fmt: skip


def run(arguments: list[str], output: str, seconds: float, deadline_s: float) -> int:
    """Run tests in a fork; its exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = -1
    try:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(file, stream)
        os.environ["KEYSHARD_TEST_DEADLINE_S"] = str(deadline_s)
        faulthandler.dump_traceback_later(seconds, exit=True)
        # Modules that are imported already cannot have their assertions rewritten.
        code = int(pytest.main(["--assert=plain", *arguments]))
        sys.stdout.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    for name in NEEDED:
        importlib.import_module(name)
    assert "keyshard" not in sys.modules, "each run imports its own"
    for line in sys.stdin:
        print(run(**json.loads(line)), flush=True)
