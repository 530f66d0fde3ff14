"""Keeps the rows of a batch at an fsspec URL until they are published.

A batch is published from its manifest only. The first commit of a batch writes the manifest; each
later commit of the same batch finds it, so that it publishes the same rows in the same order.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from keyshard.errors import KeyShardError, ProducerFencedError, StagingError
from keyshard.file_systems import location
from keyshard.redaction import scrubbed

MANIFEST, DONE = "manifest.json", "done"
"""Files of a batch: the rows to publish, and the mark that all are stored."""
_VERSION = 1
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StagedFile:
    """The rows that one task staged."""

    partition: int
    """Number of the task's part of the batch."""
    name: str
    """Name in the folder of the batch."""
    rows: int
    """Number of rows."""


class Staging:
    """A folder at an fsspec URL for staged batches.

    Args:
        url: Path or fsspec URL of the folder, such as ``s3://bucket/staging``.

    Raises:
        ConfigError: The URL names no known file system.
    """

    def __init__(self, url: str) -> None:
        self._location = location("staging", url, "a folder, such as s3://bucket/staging")
        self.files, self.root = self._location.files, self._location.path
        self.url = self._location.url

    def check(self) -> None:
        """Check that files can be written.

        Raises:
            StagingError: They cannot.
        """
        local = isinstance(self.files, LocalFileSystem)
        if local and not Path(self.root).is_dir():
            raise StagingError(
                f"The staging folder {self.url} does not exist.",
                "Create it. If it is on a volume, mount the volume first.",
            )
        path = f"{self.root}/{uuid.uuid4()}.check"
        with self.named("be written"):
            self.files.pipe_file(path, b"")
        try:
            self.files.rm_file(path)
        except Exception as exc:
            scrubbed(exc)
            raise StagingError(
                f"Files at {self.url} cannot be removed: {exc}.",
                "Allow it: keyshard removes the rows of each batch after it has published them.",
            ) from exc

    @contextmanager
    def named(self, what: str) -> Iterator[None]:
        """Raise errors of the file system as errors of staging."""
        try:
            yield
        except KeyShardError:
            raise
        except Exception as exc:
            scrubbed(exc)
            raise StagingError(
                f"The staging folder {self.url} cannot {what}: {exc}.",
                "Check the location and its permissions.",
            ) from exc


class StagedBatch:
    """The staged rows of one batch.

    Args:
        staging: The folder for all batches.
        owner: Sink and query, or sink and write, to which the batch belongs.
        batch_id: Id of the batch.
    """

    def __init__(self, staging: Staging, owner: str, batch_id: int) -> None:
        self._staging = staging
        self._files: Any = staging.files
        self._owner = f"{staging.root}/{quote(owner, safe='')}"
        self._id = batch_id
        self._folder = f"{self._owner}/{batch_id}"
        self._what = f"batch {batch_id} of {owner!r}"

    def stage(self, rows: pa.Table, partition: int) -> StagedFile:
        """Write the rows of a task. Each attempt writes a file of its own.

        Raises:
            StagingError: They cannot be written.
        """
        name = f"task-{partition}-{uuid.uuid4()}.arrow"
        path = f"{self._folder}/{name}"
        with self._staging.named("be written"):
            self._files.makedirs(self._folder, exist_ok=True)
            with self._files.open(path, "wb") as file, pa.ipc.new_file(file, rows.schema) as to:
                to.write_table(rows)
            if self._is_local:
                for one in (path, self._folder, self._owner, self._staging.root):
                    _sync(one)
        return StagedFile(partition, name, rows.num_rows)

    def decide(self, files: Sequence[StagedFile]) -> list[StagedFile]:
        """Return the files to publish. The first call for a batch decides for all later ones.

        Args:
            files: The files of this attempt of the batch.

        Raises:
            ProducerFencedError: A later batch is staged.
            StagingError: The manifest cannot be written or read.
        """
        with self._staging.named("be read"):
            later = max(self._batches(), default=self._id)
        if later > self._id:
            raise ProducerFencedError(
                f"{self._what} is older than batch {later}, which is staged. Another program uses "
                "the sink id, or the checkpoint was changed by hand.",
                "Give each new query its own checkpoint.",
            )
        ordered = sorted(files, key=lambda one: one.partition)
        text = json.dumps({"version": _VERSION, "files": [asdict(one) for one in ordered]})
        with self._staging.named("be written"):
            self._files.makedirs(self._folder, exist_ok=True)
            if not self._files.exists(self._path(MANIFEST)):
                with suppress(FileExistsError):
                    self._create(self._path(MANIFEST), text.encode())
        with self._staging.named("be read"):
            found = json.loads(self._files.cat_file(self._path(MANIFEST)))
            if found["version"] != _VERSION:
                raise StagingError(
                    f"The manifest of {self._what} has version {found['version']}; this keyshard "
                    f"reads version {_VERSION}.",
                    "Use the version that wrote it.",
                )
            return [StagedFile(**one) for one in found["files"]]

    def is_decided(self) -> bool:
        """Return whether an attempt has decided which rows are published.

        Raises:
            StagingError: The folder cannot be read.
        """
        with self._staging.named("be read"):
            return bool(self._files.exists(self._path(MANIFEST)))

    def is_done(self) -> bool:
        """Return whether all rows are stored.

        Raises:
            StagingError: The folder cannot be read.
        """
        with self._staging.named("be read"):
            return bool(self._files.exists(self._path(DONE)))

    def read(self, file: StagedFile) -> pa.Table:
        """Read a file of the manifest.

        Raises:
            StagingError: It is missing, or has other rows.
        """
        try:
            with self._files.open(self._path(file.name), "rb") as opened:
                rows = pa.ipc.open_file(opened).read_all()
        except Exception as exc:
            scrubbed(exc)
            raise StagingError(
                f"File {file.name} of {self._what} cannot be read at {self._staging.url}: {exc}.",
                "Restore it: the rows of the batch are published from it.",
            ) from exc
        if rows.num_rows != file.rows:
            raise StagingError(
                f"File {file.name} of {self._what} has {rows.num_rows} rows, but its manifest has "
                f"{file.rows}.",
                "Restore it: the rows of the batch are published from it.",
            )
        return rows

    def finish(self) -> None:
        """Mark the batch as stored, and remove its rows and all earlier batches.

        Raises:
            StagingError: The mark cannot be written.
        """
        with self._staging.named("be written"):
            self._files.pipe_file(self._path(DONE), b"")
            if self._is_local:
                _sync(self._folder)
        try:
            for path in self._files.ls(self._folder, detail=False):
                if path.endswith(".arrow"):
                    self._files.rm_file(path)
            for batch in self._batches():
                if batch < self._id:
                    self._files.rm(f"{self._owner}/{batch}", recursive=True)
        except Exception as exc:  # noqa: BLE001 - the next batch removes them
            _log.warning("cannot remove staged rows at %s: %s", self._staging.url, scrubbed(exc))

    def remove(self) -> None:
        """Remove all files of the owner, once no attempt can repeat the batch."""
        try:
            if self._files.exists(self._owner):
                self._files.rm(self._owner, recursive=True)
        except Exception as exc:  # noqa: BLE001 - what stays is not published
            _log.warning("cannot remove staged rows at %s: %s", self._staging.url, scrubbed(exc))

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"

    @property
    def _is_local(self) -> bool:
        return isinstance(self._files, LocalFileSystem)

    def _batches(self) -> list[int]:
        """Return the ids of the batches that have files."""
        self._files.invalidate_cache()
        try:
            paths = self._files.ls(self._owner, detail=False)
        except FileNotFoundError:
            return []
        names = [path.rstrip("/").rpartition("/")[2] for path in paths]
        return [int(name) for name in names if name.isdecimal()]

    def _create(self, path: str, data: bytes) -> None:
        """Write a file durably and as a whole, unless it exists."""
        if not self._is_local:
            self._files.pipe_file(path, data, mode="create")
            return
        new = Path(f"{path}.{uuid.uuid4()}")
        try:
            new.write_bytes(data)
            _sync(new)
            os.link(new, path)
        finally:
            new.unlink(missing_ok=True)
        _sync(self._folder)


def _sync(path: str | Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
