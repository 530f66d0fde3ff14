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

_held: dict[Path, int] = {}
"""Lock files that this process holds, and its id: a lock never refuses the process that holds it,
and a copy of the process holds none."""
_held_lock = threading.Lock()


class CheckpointLock:
    """Held from its making until :meth:`close`.

    Args:
        path: The checkpoint's file; folders that are missing are made.

    Raises:
        CheckpointInUseError: Another source has it.
        CheckpointError: Nothing can be written there.
    """

    def __init__(self, path: Path) -> None:
        self._path = Path(os.path.realpath(path)).with_name(f"{path.name}.lock")
        self._file: TextIO | None = None
        with _held_lock:
            if _held.get(self._path) == os.getpid():
                raise self._in_use(f"another source of this process, {os.getpid()}")
            self._file = self._locked(path)
            _held[self._path] = os.getpid()

    def close(self) -> None:
        """Let others have it. Idempotent."""
        with _held_lock:
            if self._file is not None:
                # The file stays: whoever waits for it must not lock one that is gone.
                self._file.close()
                self._file = None
                del _held[self._path]

    def _locked(self, path: Path) -> TextIO:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = self._path.open("a+", encoding="utf-8")
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
