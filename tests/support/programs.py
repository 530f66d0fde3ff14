"""Programs that wait most of their time, and so run at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

Name = TypeVar("Name")


@contextmanager
def started(programs: Mapping[Name, Sequence[str]]) -> Iterator[dict[Name, subprocess.Popen[str]]]:
    """Run Python programs until the block ends, which kills the rest of them.

    Args:
        programs: Code and arguments by name.
    """
    with ExitStack() as until:
        processes = {}
        for name, program in programs.items():
            processes[name] = subprocess.Popen(
                [sys.executable, "-c", *program],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            until.enter_context(processes[name])
            until.callback(processes[name].kill)
        yield processes
