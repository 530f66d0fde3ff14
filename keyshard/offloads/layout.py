"""The layout of an offloaded ledger: the places of its entries in its data file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

ENTRY_BYTES_MAX = 256 * 1024 * 1024
"""Longest entry that is read, bytes."""
PARSED_BYTES_MAX = 32 * 1024 * 1024
"""Bytes of entries that end a parsing step. Compressed entries may take a thousand times the bytes
of the file."""


class LayoutError(Exception):
    """A file does not have the format of an offloader. The text says why."""


class Parsed(NamedTuple):
    """The whole entries at the beginning of some bytes."""

    entries: Sequence[tuple[int, bytes]]
    """Number and bytes of each entry, as bookies stored it."""
    offset: int
    """Offset in the file after these entries."""
    wanted: int
    """Least number of bytes from that offset on that have another entry; 0: the given ones may."""


class Layout(Protocol):
    """The entries of one ledger in one file."""

    path: str
    """The file."""
    size: int
    """Size of the file, bytes."""

    def place_of(self, entry: int) -> tuple[int, int | None]:
        """Return where to parse the file for an entry.

        Returns:
            The offset of the entry, or of an earlier one, and the number of the first entry there;
            ``None``: the index does not say it.

        Raises:
            LayoutError: The index begins after the entry.
        """

    def parsed(self, data: bytes, offset: int) -> Parsed:
        """Parse whole entries.

        Args:
            data: Bytes of the file.
            offset: Their offset in the file; one that :meth:`place_of` or this method returned.

        Raises:
            LayoutError: They are not entries.
        """
