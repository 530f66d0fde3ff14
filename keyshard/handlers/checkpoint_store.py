"""Stores the newest checkpoint durably at an fsspec URL."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import threading
from pathlib import Path
from typing import TextIO

from fsspec.implementations.local import LocalFileSystem

from keyshard.config.handlers import checkpoint_url
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.errors import CheckpointError, CheckpointInUseError, ConfigError
from keyshard.file_systems import location
from keyshard.redaction import scrubbed, shown

_log = logging.getLogger(__name__)
_ATOMIC = {"abfs", "abfss", "adl", "az", "gcs", "gs", "memory", "oci", "oss", "r2", "s3", "s3a"}
"""File systems of fsspec that replace an object at once, so that no reader sees a part of it."""
COPY = ".new"
"""End of the path of a copy."""
_USER_OF_LOCAL = re.compile(r"://[^/].*@", re.DOTALL)
"""User and password of a URL. As part of a path they would not be recognised as secrets."""


class CheckpointStore:
    """Stores the newest checkpoint of a source; a crash leaves either the old one or the new one.

    On a local disk, symbolic links are followed to the file. A new checkpoint is written beside it,
    synced and renamed. Object stores replace objects atomically. On other file systems, such as
    SFTP, a copy is written first, and removed when the checkpoint itself is whole.

    Args:
        given: Path of a file, or its fsspec URL, such as ``s3://bucket/orders.json``. A local
            folder must exist, so that a volume that is not mounted is an error.

    Raises:
        ConfigError: The URL names no known file system or no file, or it names a user although the
            file is local.
    """

    def __init__(self, given: str | os.PathLike[str]) -> None:
        url = checkpoint_url(given)
        example = "a file, such as file:///var/lib/app/orders.json"
        self._location = location("checkpoint", url, example)
        self._files, self._path = self._location.files, self._location.path
        if not self._path.strip("/") or url.endswith("/"):
            raise ConfigError(f"checkpoint is {shown(url)}; it must name a file, not a folder.")
        if isinstance(self._files, LocalFileSystem):
            if _USER_OF_LOCAL.search(url):
                raise ConfigError(
                    f"checkpoint is {shown(url)}: a local file has no host and no user.",
                    "Write its path, such as file:///var/lib/app/orders.json, or the scheme of "
                    "the store, such as s3.",
                )
            # A rename onto a symbolic link would replace the link by a file on another volume.
            self._path = os.path.realpath(self._path)
        self._url = self._location.url
        self._lock: CheckpointLock | None = None
        protocol = self._files.protocol
        names = {protocol} if isinstance(protocol, str) else set(protocol)
        self._copies = not (names & _ATOMIC or isinstance(self._files, LocalFileSystem))
        self._copy = f"{self._path}{COPY}"
        self._only_copy = False
        """Whether the copy may be the only whole checkpoint."""

    def open(self) -> Checkpoint | None:
        """Take the checkpoint until :meth:`close`, check that it can be written, and load it.

        Files on a local disk are locked. Object stores have no locks: there only the broker keeps
        two sources of one subscription apart.

        Raises:
            CheckpointInUseError: Another running source holds it.
            CheckpointError: It cannot be read or written.
        """
        if isinstance(self._files, LocalFileSystem):
            self._lock = CheckpointLock(Path(self._path))
        else:
            self._try_to_write(f"{self._path}.check")
        try:
            return self.load()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the lock. Idempotent."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _try_to_write(self, path: str) -> None:
        try:
            self._files.pipe_file(path, b"")
        except Exception as exc:
            scrubbed(exc)
            raise CheckpointError(
                f"The checkpoint {self._url} cannot be written: {exc}.",
                "Use a location that this process may write to.",
            ) from exc
        try:
            self._files.rm_file(path)
        except Exception as exc:  # noqa: BLE001 - permission to write does not include removal
            _log.debug("could not remove the empty file %s: %s", path, exc)

    def load(self) -> Checkpoint | None:
        """Load the checkpoint stored last; ``None`` if there is none.

        Raises:
            CheckpointError: It cannot be read.
        """
        content = self._read(self._path)
        if self._copies and (content is None or not _is_whole(content)):
            copy = self._read(self._copy)
            if copy is not None and _is_whole(copy):
                self._only_copy = True
                content = copy
                _log.warning(
                    "%s is missing or cut off, so its copy %s.new is used; to begin anew, delete "
                    "both", self._url, self._url,
                )  # fmt: skip
        if content is None:
            return None
        try:
            return Checkpoint.from_json(_text_of(content))
        except CheckpointError as exc:
            raise CheckpointError(
                f"The checkpoint {self._url} cannot be read: {exc.problem}",
                f"{exc.remedy} To begin at the cursor of the subscription, use another file.",
            ) from exc

    def _read(self, path: str) -> bytes | None:
        try:
            content: bytes = self._files.cat_file(path)
        except FileNotFoundError:
            return None
        except Exception as exc:
            scrubbed(exc)
            raise CheckpointError(
                f"The checkpoint {self._url} cannot be read: {exc}.",
                "Check the location and its permissions.",
            ) from exc
        return content

    def save(self, checkpoint: Checkpoint) -> int:
        """Replace the stored checkpoint durably, and return its size in bytes.

        Raises:
            CheckpointError: It could not be written; the old one stays.
        """
        text = checkpoint.to_json()
        try:
            if isinstance(self._files, LocalFileSystem):
                _replace(Path(self._path), text)
            elif self._copies:
                self._write_twice(text.encode())
            else:
                self._files.pipe_file(self._path, text.encode())
        except Exception as exc:
            scrubbed(exc)
            raise CheckpointError(
                f"The checkpoint {self._url} cannot be stored: {exc}. Nothing of it was "
                "acknowledged, so it is delivered again.",
                "Check the location and its permissions.",
            ) from exc
        return len(text)

    def _write_twice(self, content: bytes) -> None:
        """Write a copy and then the checkpoint: at any moment, one of the two is whole."""
        if not self._only_copy:
            self._files.pipe_file(self._copy, content)
            self._only_copy = True
        self._files.pipe_file(self._path, content)
        self._only_copy = False
        try:
            self._files.rm_file(self._copy)
        except Exception as exc:  # noqa: BLE001 - permission to write does not include removal
            _log.debug("could not remove %s: %s", self._copy, exc)


def _text_of(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as exc:
        raise CheckpointError(
            f"The checkpoint is not text in UTF-8: {exc.reason} at byte {exc.start}.",
            "Restore it, or start with a new checkpoint.",
        ) from exc


def _is_whole(content: bytes) -> bool:
    """Return whether a file is complete JSON. A partly written checkpoint is not."""
    try:
        json.loads(content.decode())
    except (ValueError, RecursionError):
        return False
    return True


def _replace(path: Path, text: str) -> None:
    # The lock leaves one writer, so a file left by a crash is overwritten.
    new = path.with_name(f"{path.name}.new")
    try:
        with new.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


# -- One running source for each checkpoint file: a lock of the operating system beside it ---------
# The lock belongs to the process, not to the file: a crashed process holds none, and processes
# started by a handler do not inherit it.

_held: dict[tuple[int, int], int] = {}
"""Lock files of this process by device and inode, with its process id. A POSIX lock never refuses
the process that holds it, and a forked process holds none. Several paths may lead to one file."""
_held_lock = threading.Lock()


class CheckpointLock:
    """A lock, held from construction until :meth:`close`.

    Args:
        path: The checkpoint's file, without symbolic links.

    Raises:
        CheckpointInUseError: Another source holds it.
        CheckpointError: The folder or file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(f"{path.name}.lock")
        self._file: TextIO | None = None
        self._inode = (0, 0)
        with _held_lock:
            # Checked before the file is opened: closing any handle of it would release its lock.
            if _held.get(self._found()) == os.getpid():
                raise self._in_use(f"another source of this process, {os.getpid()}")
            self._file = self._locked(path)
            self._inode = self._found()
            _held[self._inode] = os.getpid()

    def close(self) -> None:
        """Release the lock. Idempotent."""
        with _held_lock:
            if self._file is not None:
                # The file stays: another process that waits for it must not lock a deleted file.
                self._file.close()
                self._file = None
                _held.pop(self._inode, None)

    def _found(self) -> tuple[int, int]:
        """Return device and inode of the lock file; ``(0, 0)`` if it does not exist."""
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
                    "exist.",
                    "Create the folder. If it is on a volume, mount the volume first.",
                )
            if path.exists() and not path.is_file():
                raise CheckpointError(
                    f"The checkpoint {path} cannot be written: it is not a file.", "Name a file."
                )
            file = self._path.open("a+", encoding="utf-8", errors="replace")
        except OSError as exc:
            raise CheckpointError(
                f"The checkpoint {path} cannot be written: {exc}.",
                "Use a file in a folder that this process may write to.",
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
                f"The checkpoint {path} cannot be locked or written: {exc}.",
                "Use a file on a disk with free space and file locks.",
            ) from exc
        return file

    def _in_use(self, holder: str) -> CheckpointInUseError:
        return CheckpointInUseError(
            f"The checkpoint of {self._path.name.removesuffix('.lock')} in {self._path.parent} is "
            f"in use by {holder}. Two sources would overwrite each other's checkpoint.",
            "Stop the other source, or give this one its own checkpoint.",
        )
