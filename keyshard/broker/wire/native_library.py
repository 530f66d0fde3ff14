"""Loads the libraries in ``native/`` that the install builds if it can."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

UNLOCKED_BYTES_MIN = 256 * 1024
"""Size from which a call releases the interpreter lock, bytes. Below it, reacquiring the lock may
take longer than the call."""


class NativeLibrary:
    """The functions of a library.

    Args:
        path: File of the library.
        version: Name of the function that returns the interface version.
        results: C return types of the functions, by name.

    Raises:
        OSError: There is no library for this machine.
        AttributeError: The library lacks a function.
    """

    def __init__(self, path: Path, version: str, results: Mapping[str, Any]) -> None:
        self._calls = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
        for library in self._calls:
            for name, result in {version: ctypes.c_uint64, **results}.items():
                getattr(library, name).restype = result
        self.version: int = getattr(self._calls[0], version)()

    def calls(self, size: int) -> Any:
        """Return the functions for ``size`` bytes; large calls release the interpreter lock."""
        return self._calls[size >= UNLOCKED_BYTES_MIN]


def load(path: Path, version: str, wanted: int, results: Mapping[str, Any]) -> NativeLibrary | None:
    """Return a library; ``None`` if none can be loaded with the wanted interface version."""
    with suppress(OSError, AttributeError):
        library = NativeLibrary(path, version, results)
        if library.version == wanted:
            return library
    return None
