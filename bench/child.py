"""Runs a module in a separate process, so that measurements do not disturb each other."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def child(module: str, *arguments: str, timeout_s: float | None = None) -> Any:
    """Run a module and parse the JSON in its last line."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=timeout_s,
    )
    return json.loads(done.stdout.splitlines()[-1])
