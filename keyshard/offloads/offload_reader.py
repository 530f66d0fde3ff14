"""Reads consecutive entries of an offloaded ledger from its store, in order."""

from __future__ import annotations

from functools import partial
from typing import Any

from keyshard.broker.wire.entries import RawEntry
from keyshard.core.option_checks import check_folder
from keyshard.core.position.entry import TopicPartition, entry_id_of
from keyshard.core.position.replicas import OffloadedLedger
from keyshard.file_systems import location
from keyshard.offloads.blocks import Blocks, data_path
from keyshard.offloads.layout import Layout, LayoutError
from keyshard.offloads.map_file import MapFile, folder_of
from keyshard.redaction import scrubbed

FETCH_MIN_BYTES, FETCH_MAX_BYTES = 1024 * 1024, 8 * 1024 * 1024
"""Least and most bytes of a request; later requests of a reader are larger."""
INDEX_BYTES_MAX = 16 * 1024 * 1024
"""Largest index of a ledger, bytes."""
TEXT_MAX = 500
"""Longest text of an error of a store, characters."""


class OffloadNotReadError(Exception):
    """The store did not return an entry. The text says why."""


class StoreFailedError(OffloadNotReadError):
    """The store itself fails, so reads of other ledgers would fail in the same way."""


class Offloads:
    """The store to which the brokers of a cluster offload ledgers.

    Args:
        url: Path or fsspec URL of the bucket, such as ``s3://bucket``. For Pulsar's file system
            driver, that of the folder with the folders of the tenants.

    Raises:
        ConfigError: The URL is not a string, or names no known file system.
    """

    def __init__(self, url: str) -> None:
        check_folder("offloads", url)
        self._location = location("offloads", url, "the store of offloads, such as s3://bucket")
        self._files: Any = self._location.files
        self._root = self._location.path.rstrip("/")
        self.url = self._location.url
        """The URL without credentials."""

    def layout(self, topic_partition: TopicPartition, ledger: OffloadedLedger) -> Layout:
        """Return where the entries of a ledger are.

        Raises:
            OffloadNotReadError: The store has no such ledger, or does not answer.
        """
        try:
            return self._blocks(ledger) or self._map_file(topic_partition, ledger)
        except FileNotFoundError:
            raise OffloadNotReadError(f"its offload is not at {self.url}") from None
        except LayoutError as exc:
            raise _malformed(exc) from None
        except OffloadNotReadError:
            raise
        except Exception as exc:  # noqa: BLE001 - whatever a file system raises
            raise self._failed(exc) from None

    def fetch(self, path: str, start: int, end: int) -> bytes:
        """Return bytes of a file; fewer if it ends earlier.

        Raises:
            OffloadNotReadError: The store does not answer.
        """
        try:
            found: bytes = self._files.cat_file(path, start=start, end=end)
        except Exception as exc:  # noqa: BLE001 - whatever a file system raises
            raise self._failed(exc) from None
        return found

    def _blocks(self, ledger: OffloadedLedger) -> Layout | None:
        path = data_path(self._root, ledger.uuid, ledger.ledger)
        try:
            index = self._whole(f"{path}-index")
        except FileNotFoundError:
            return None
        return Blocks(path, index, ledger)

    def _map_file(self, topic_partition: TopicPartition, ledger: OffloadedLedger) -> Layout:
        folder = folder_of(self._root, topic_partition, ledger.uuid, ledger.ledger)
        path = f"{folder}/data"
        size = self._size(path)
        fetch = partial(self.fetch, path)
        return MapFile(path, size, fetch, self._whole(f"{folder}/index"), ledger)

    def _whole(self, path: str) -> bytes:
        """Return an index file."""
        size = self._size(path)
        if size > INDEX_BYTES_MAX:
            raise LayoutError(f"its index has {size:,} bytes, more than {INDEX_BYTES_MAX:,}")
        found: bytes = self._files.cat_file(path, start=0, end=size)
        return found

    def _size(self, path: str) -> int:
        """Return the size of a file, bytes."""
        self._files.invalidate_cache()  # The process may have an older listing of the folder.
        return int(self._files.info(path)["size"])

    def _failed(self, exc: Exception) -> OffloadNotReadError:
        # Without permission to list the bucket, a store refuses a request for a missing object.
        of_file = isinstance(exc, FileNotFoundError | PermissionError)
        error = OffloadNotReadError if of_file else StoreFailedError
        said = " ".join(str(scrubbed(exc)).split())[:TEXT_MAX]
        return error(f"{self.url} failed: {said or type(exc).__name__}")


class OffloadReader:
    """Reads entries of one offloaded ledger. The store is asked when the first of them is read.

    Args:
        offloads: The store.
        topic_partition: The topic partition of the ledger.
        ledger: The ledger.
        entries: First and last entry to read, the last at most that of the ledger.
        bytes_max: Largest request, bytes, unless one entry is larger.
    """

    def __init__(
        self,
        offloads: Offloads,
        topic_partition: TopicPartition,
        ledger: OffloadedLedger,
        entries: tuple[int, int],
        bytes_max: int,
    ) -> None:
        first, last = entries
        self._offloads = offloads
        self._topic_partition = topic_partition
        self._ledger = ledger
        self.last = min(last, ledger.last)
        """Last entry to read."""
        self._next = first
        self._expected: int | None = None
        """The next entry in the file; ``None``: the wanted one, or one before it."""
        self._layout: Layout | None = None
        self._offset = 0
        """Offset of the next bytes to parse."""
        self._rest = b""
        """Bytes from there on that were fetched."""
        self._wanted = 1
        """Least number of bytes from the offset on that have another entry."""
        self._fetch_bytes = min(FETCH_MIN_BYTES, bytes_max)
        self._fetch_bytes_max = min(FETCH_MAX_BYTES, bytes_max)

    @property
    def done(self) -> bool:
        """Whether all entries were returned."""
        return self._next > self.last

    def read(self) -> list[RawEntry]:
        """Return the next entries, in order; at least one, until :attr:`done`.

        Raises:
            OffloadNotReadError: The store did not return the next entry.
        """
        if self.done:
            return []
        try:
            if self._layout is None:
                self._layout = self._offloads.layout(self._topic_partition, self._ledger)
                self._offset, self._expected = self._layout.place_of(self._next)
            while not (found := self._parsed(self._layout, self._more(self._layout))):
                pass  # the wanted entries come later
        except LayoutError as exc:
            raise _malformed(exc) from None
        return found

    def _more(self, layout: Layout) -> bytes:
        """Return the fetched bytes from ``_offset`` on; fetch more if they lack a whole entry."""
        if len(self._rest) >= self._wanted:
            return self._rest
        start = self._offset + len(self._rest)
        end = min(max(start + self._fetch_bytes, self._offset + self._wanted), layout.size)
        if start >= end:
            raise LayoutError(f"its data ends before entry {self._next}")
        self._fetch_bytes = min(2 * self._fetch_bytes, self._fetch_bytes_max)
        fetched = self._offloads.fetch(layout.path, start, end)
        if len(fetched) != end - start:
            raise LayoutError(f"its data ends after {start + len(fetched)} of {layout.size} bytes")
        return self._rest + fetched

    def _parsed(self, layout: Layout, data: bytes) -> list[RawEntry]:
        """Return the wanted entries at the beginning of some bytes."""
        parsed = layout.parsed(data, self._offset)
        self._rest = data[parsed.offset - self._offset :]
        self._offset, self._wanted = parsed.offset, parsed.wanted
        found = []
        for entry, content in parsed.entries:
            if self._next > self.last:
                break
            if entry > self._next or self._expected not in (None, entry):
                raise LayoutError(f"entry {entry} stands where another one belongs")
            self._expected = entry + 1
            if entry == self._next:
                at = entry_id_of((self._ledger.ledger, entry))
                found.append(RawEntry(at, content, 0))
                self._next = entry + 1
        return found


def _malformed(exc: LayoutError) -> OffloadNotReadError:
    return OffloadNotReadError(f"its offload cannot be understood: {exc}")
