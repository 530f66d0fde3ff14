"""Runs a module in a process of its own, so that measurements do not disturb each other."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def child(module: str, *arguments: str) -> Any:
    """Run a module and read the JSON of its last line."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])
