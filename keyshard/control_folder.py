"""The private folder of control sockets: no other user can put a socket there."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from keyshard.errors import ControlError


def candidates() -> Iterator[Path]:
    """Yield the folders that may hold control sockets; new ones are in the first."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        yield Path(runtime) / "keyshard"
    yield Path(tempfile.gettempdir()) / f"keyshard-{os.getuid()}"


def folders() -> list[Path]:
    """Return the existing private folders of the user."""
    return [folder for folder in candidates() if is_own_folder(folder)]


def is_own_folder(folder: Path) -> bool:
    """Whether a path is a folder of this user that nobody else may enter."""
    try:
        facts = folder.lstat()
    except OSError:
        return False
    own = facts.st_uid == os.getuid() and not stat.S_IMODE(facts.st_mode) & 0o077
    return stat.S_ISDIR(facts.st_mode) and own


def own_folder() -> Path:
    """Return the private folder for new sockets, which is created if it is missing.

    Raises:
        ControlError: It cannot be created, or others can enter it.
    """
    folder = next(candidates())
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as exc:
        raise ControlError(
            f"The folder {folder} cannot be created: {exc}.", "Set XDG_RUNTIME_DIR."
        ) from exc
    if not is_own_folder(folder):
        raise ControlError(
            f"{folder} is not a private folder of this user (mode 0700).",
            "Remove it, or set XDG_RUNTIME_DIR.",
        )
    return folder
