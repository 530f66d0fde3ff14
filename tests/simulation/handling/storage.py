"""The checkpoint storage of programs in a simulation: a file system that may fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

import fsspec
from fsspec import AbstractFileSystem

PROTOCOL = "simulated"


class Disk(Protocol):
    """The state that survives every process of one program."""

    files: dict[str, bytes]

    def save(self, path: str, data: bytes) -> None:
        """Store a file; takes time, and may fail or end the process."""


class SimulatedFiles(AbstractFileSystem):
    """``simulated://program/path``: replaces whole files, as an object store does."""

    protocol = PROTOCOL
    cachable = False
    disks: ClassVar[dict[str, Disk]] = {}

    def cat_file(self, path: str, start: Any = None, end: Any = None, **_: Any) -> bytes:
        files = self._disk(path).files
        if path not in files:
            raise FileNotFoundError(path)
        return files[path][start:end]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:  # noqa: ARG002
        if value:
            self._disk(path).save(path, value)
        else:  # a start writes an empty file to check its permissions
            self._disk(path).files[path] = value

    def rm_file(self, path: str) -> None:
        del self._disk(path).files[path]

    def _disk(self, path: str) -> Disk:
        return self.disks[path.partition("/")[0]]


@contextmanager
def simulated_files(disks: dict[str, Disk]) -> Iterator[None]:
    """The file system, until the block ends.

    Args:
        disks: By the name of their program.
    """
    fsspec.register_implementation(PROTOCOL, SimulatedFiles, clobber=True)
    SimulatedFiles.disks = disks
    try:
        yield
    finally:
        SimulatedFiles.disks = {}
