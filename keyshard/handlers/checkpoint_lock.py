"""One running source for each checkpoint file: a lock of the operating system beside it.

The lock belongs to the process, not to the file: a process that crashed holds none. It does not
pass to processes that a handler starts.
"""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path
from typing import TextIO

from keyshard.errors import CheckpointError, CheckpointInUseError

_held: dict[tuple[int, int], int] = {}
"""Lock files that this process holds by device and inode, and its id: a lock never refuses the
process that holds it, and a copy of the process holds none. Several paths may lead to one file."""
_held_lock = threading.Lock()


class CheckpointLock:
    """Held from its making until :meth:`close`.

    Args:
        path: The checkpoint's file, without symbolic links.

    Raises:
        CheckpointInUseError: Another source has it.
        CheckpointError: Nothing can be written there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(f"{path.name}.lock")
        self._file: TextIO | None = None
        self._inode = (0, 0)
        with _held_lock:
            # Looked at before it is opened: closing any handle of it would give up its lock.
            if _held.get(self._found()) == os.getpid():
                raise self._in_use(f"another source of this process, {os.getpid()}")
            self._file = self._locked(path)
            self._inode = self._found()
            _held[self._inode] = os.getpid()

    def close(self) -> None:
        """Let others have it. Idempotent."""
        with _held_lock:
            if self._file is not None:
                # The file stays: another process that waits for it must not lock one that is gone.
                self._file.close()
                self._file = None
                _held.pop(self._inode, None)

    def _found(self) -> tuple[int, int]:
        """Device and inode of the lock file."""
        try:
            facts = self._path.stat() if self._file is None else os.fstat(self._file.fileno())
        except OSError:
            return (0, 0)
        return (facts.st_dev, facts.st_ino)

    def _locked(self, path: Path) -> TextIO:
        try:
            if not path.parent.exists():
                raise CheckpointError(
                    f"The checkpoint {path} cannot be written: the folder {path.parent} does not "
                    "exist. Create it; if it lies on a volume, mount that first."
                )
            if path.exists() and not path.is_file():
                raise CheckpointError(f"The checkpoint {path} cannot be written: it is no file.")
            file = self._path.open("a+", encoding="utf-8", errors="replace")
        except OSError as exc:
            raise CheckpointError(
                f"The checkpoint {path} cannot be written: {exc}. Name a file in a folder that "
                "this process may write to."
            ) from exc
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
        except BlockingIOError as exc:
            file.seek(0)
            holder = file.read().strip()
            file.close()
            raise self._in_use(f"process {holder}") from exc
        except OSError as exc:
            file.close()
            raise CheckpointError(
                f"The checkpoint {path} cannot be locked or written: {exc}. Name a file on a disk "
                "that has room and locks."
            ) from exc
        return file

    def _in_use(self, holder: str) -> CheckpointInUseError:
        return CheckpointInUseError(
            f"The checkpoint of {self._path.name.removesuffix('.lock')} in {self._path.parent} is "
            f"in use by {holder}. Two sources would overwrite each other's; stop that one, or give "
            "this one a checkpoint of its own."
        )
