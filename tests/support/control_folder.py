"""A folder for control sockets that is this test's own, and short enough for a socket."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from keyshard import control_folder


@contextmanager
def own_control_folder() -> Iterator[Path]:
    """Control sockets of this process, and of those it starts, are made in a new folder."""
    with tempfile.TemporaryDirectory(prefix="ks-") as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name) / "keyshard"
        patch.setenv("XDG_RUNTIME_DIR", name)
        # Sources that run on this machine with the usual temporary folder are not found either.
        patch.setattr(control_folder, "candidates", lambda: iter([folder]))
        yield folder
