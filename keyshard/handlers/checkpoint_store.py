"""Keeps the newest checkpoint durably behind an fsspec URL."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from keyshard.config.handlers import checkpoint_url
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.errors import CheckpointError, ConfigError
from keyshard.handlers.checkpoint_lock import CheckpointLock
from keyshard.redaction import redacted, scrubbed, shown

_log = logging.getLogger(__name__)
_USER_OF_LOCAL = re.compile(r"://[^/].*@", re.DOTALL)
"""User and password of a URL. As part of a path they would no longer be recognised as secrets."""


class CheckpointStore:
    """The newest checkpoint of a source; a crash leaves either the old one or the new one.

    Args:
        given: Path of a file, or its fsspec URL, such as ``s3://bucket/orders.json``. On a local
            disk, symbolic links are followed to the file; a new checkpoint is written beside it,
            synced and renamed. Its folder has to exist: a volume that is not mounted is an error.
            Object stores replace objects atomically.

    Raises:
        ConfigError: The URL names no known file system, no file, or a user of a local disk.
    """

    def __init__(self, given: str | os.PathLike[str]) -> None:
        url = checkpoint_url(given)
        try:
            self._files, self._path = fsspec.core.url_to_fs(url)
        except Exception as exc:  # noqa: BLE001 - whatever a file system raises; it may show the URL
            raise ConfigError(
                f"checkpoint is {shown(url)}: {exc}. Write an fsspec URL of a file, such as "
                "file:///var/lib/app/orders.json."
            ) from None
        if not self._path.strip("/") or url.endswith("/"):
            raise ConfigError(f"checkpoint is {shown(url)}; it must name a file, not a folder.")
        if isinstance(self._files, LocalFileSystem):
            if _USER_OF_LOCAL.search(url):
                raise ConfigError(
                    f"checkpoint is {shown(url)}: a local file has no host and no user. Write its "
                    "path, such as file:///var/lib/app/orders.json, or name the scheme of the "
                    "store, such as s3."
                )
            # A rename onto a symbolic link would replace the link by a file on another volume.
            self._path = os.path.realpath(self._path)
        self._url = redacted(url)
        self._lock: CheckpointLock | None = None

    def open(self) -> Checkpoint | None:
        """Hold it until :meth:`close`, see that it can be written, and load it.

        Files on a local disk are locked. Object stores have no locks: there only the broker keeps
        two sources of one subscription apart.

        Raises:
            CheckpointInUseError: Another running source has it.
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
        """Let others have it. Idempotent."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _try_to_write(self, path: str) -> None:
        try:
            self._files.pipe_file(path, b"")
        except Exception as exc:
            scrubbed(exc)
            raise CheckpointError(
                f"The checkpoint {self._url} cannot be written: {exc}. Name a place that this "
                "process may write to."
            ) from exc
        try:
            self._files.rm_file(path)
        except Exception as exc:  # noqa: BLE001 - who may write there may not remove
            _log.debug("%s stays, empty: %s", path, exc)

    def load(self) -> Checkpoint | None:
        """The checkpoint stored last; ``None`` when there is none.

        Raises:
            CheckpointError: It cannot be read.
        """
        try:
            text = self._files.cat_file(self._path).decode()
        except FileNotFoundError:
            return None
        except Exception as exc:
            scrubbed(exc)
            raise CheckpointError(f"Could not read the checkpoint {self._url}: {exc}.") from exc
        try:
            return Checkpoint.from_json(text)
        except CheckpointError as exc:
            raise CheckpointError(
                f"Could not read the checkpoint {self._url}: {exc.message} Restore it, or name "
                "another file to begin from what the broker knows."
            ) from exc

    def save(self, checkpoint: Checkpoint) -> int:
        """Replace what is stored; it is durable when this returns. Its size, bytes.

        Raises:
            CheckpointError: It could not be written; the old one stands.
        """
        text = checkpoint.to_json()
        try:
            if isinstance(self._files, LocalFileSystem):
                _replace(Path(self._path), text)
            else:
                self._files.pipe_file(self._path, text.encode())
        except Exception as exc:
            scrubbed(exc)
            raise CheckpointError(
                f"Could not store the checkpoint {self._url}: {exc}. Nothing of it was "
                "acknowledged; it comes again."
            ) from exc
        return len(text)


def _replace(path: Path, text: str) -> None:
    # The lock leaves one writer, so a file of one that crashed is written anew.
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
