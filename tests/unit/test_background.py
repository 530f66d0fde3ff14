"""The tests' processes take signals also where the tests themselves run in the background."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.deadlines import deadline

ROOT = Path(__file__).parents[2]
_PROGRAM = """\
import signal, subprocess, sys
import tests.conftest
child = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
print(subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout)
"""


def test_a_child_of_tests_in_the_background_takes_an_interrupt() -> None:
    # As a shell starts "make test &".
    command = 'trap "" INT QUIT; exec "$0" -c "$1"'
    done = subprocess.run(
        ["/bin/sh", "-c", command, sys.executable, _PROGRAM],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=deadline(60),
        check=False,
    )
    assert done.stdout.strip() == "True", done.stderr
