"""Keeps the zones of closed ledgers as Parquet files in a folder, by topic partition.

The first read of a ledger writes its zones, and later reads leave out those without a wanted
message. A file names its ledgers. A zone that does not fit a stored ledger is not used, and a file
with only such zones is removed. The index only saves work: if it cannot be read or written, a
warning says so, and everything is read.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from typing import Any
from urllib.parse import quote

import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem
from pyarrow import parquet

from keyshard.core.option_checks import check_folder
from keyshard.core.position.entry import TopicPartition
from keyshard.core.position.zones import Storage, Zone
from keyshard.file_systems import location
from keyshard.redaction import redacted, scrubbed

SUFFIX = ".zones.parquet"
SMALL_BYTES = 4 * 1024 * 1024
"""Size of a file up to which it is fetched whole, and joined with others."""
FETCHED_TOGETHER = 64
"""Small files that are fetched at once."""
SMALL_MAX = 64
"""Most small files of a topic partition before a plan joins them."""
_VERSION = b"1"
_TIME = pa.timestamp("ms", tz="UTC")
_SCHEMA = pa.schema([
    pa.field("ledger", pa.int64(), nullable=False),
    pa.field("ledger_entries", pa.int64(), nullable=False),
    pa.field("ledger_bytes", pa.int64(), nullable=False),
    pa.field("first", pa.int64(), nullable=False),
    pa.field("end", pa.int64(), nullable=False),
    pa.field("rows", pa.int64(), nullable=False),
    pa.field("publish_min", _TIME),
    pa.field("publish_max", _TIME),
    pa.field("event_min", _TIME),
    pa.field("event_max", _TIME),
    pa.field("schema_versions", pa.list_(pa.int64()), nullable=False),
    pa.field("keys", pa.binary(), nullable=False),
])  # fmt: skip
_TIMES = ("publish_min", "publish_max", "event_min", "event_max")

_log = logging.getLogger(__name__)


class LedgerIndex:
    """A folder of zones.

    Args:
        url: Path or fsspec URL of the folder, such as ``s3://bucket/index``. It is made if it does
            not exist. Each cluster needs a folder of its own.

    Raises:
        ConfigError: The URL is not a string, or names no known file system.
    """

    def __init__(self, url: str) -> None:
        check_folder("ledger_index", url)
        self._location = location("ledger_index", url, "a folder, such as s3://bucket/index")
        self._files, self._root = self._location.files, self._location.path

    def zones(self, storage: Storage, *, keys: bool) -> Iterator[Zone]:
        """Yield the zones that fit the stored ledgers; remove files that have no such zone.

        Args:
            storage: The stored content of the topic partition.
            keys: Whether the hashes of keys are wanted.
        """
        try:
            yield from self._zones(storage, keys=keys)
        except Exception as exc:  # noqa: BLE001 - whatever a file system raises
            _log.warning(
                "The index of %s at %s cannot be read: %s. The read covers entries that the index "
                "may rule out. Check the location and its permissions.",
                storage.topic_partition, self._location.url, scrubbed(exc),
            )  # fmt: skip

    def save(self, storage: Storage, zones: Sequence[Zone]) -> None:
        """Write zones that a read made, as one file."""
        if not zones:
            return
        try:
            self._write(storage, _table(storage, zones))
        except Exception as exc:  # noqa: BLE001 - whatever a file system raises
            _log.warning(
                "%d zones of %s cannot be written to the index at %s: %s. Later reads look at "
                "these entries again. Check the location and its permissions.",
                len(zones), storage.topic_partition, self._location.url, scrubbed(exc),
            )  # fmt: skip

    def _zones(self, storage: Storage, *, keys: bool) -> Iterator[Zone]:
        files = self._listed(storage.topic_partition)
        small = [path for path, size in files.items() if size <= SMALL_BYTES]
        joins = len(small) > SMALL_MAX
        for start in range(0, len(small), FETCHED_TOGETHER):
            paths = small[start : start + FETCHED_TOGETHER]
            found: dict[str, pa.Table] = {}
            # Unlike "cat", this takes no path for a pattern.
            contents = self._files.cat_ranges(paths, None, None, on_error="return")
            for path, content in zip(paths, contents, strict=True):
                if isinstance(content, FileNotFoundError):
                    continue  # another plan has joined it with others
                if isinstance(content, Exception):
                    raise content
                fitting = self._fitting(path, BytesIO(content), storage, keys=keys or joins)
                if fitting is not None:
                    found[path] = fitting
                    yield from _zones(fitting)
            if joins and len(found) > 1:
                joins = self._join(storage, found)
        for path in files.keys() - set(small):
            try:
                with self._files.open(path, "rb") as opened:
                    fitting = self._fitting(path, opened, storage, keys=keys)
            except FileNotFoundError:
                continue  # another plan removed it
            if fitting is not None:
                yield from _zones(fitting)

    def _join(self, storage: Storage, found: Mapping[str, pa.Table]) -> bool:
        """Write the zones of files as one file, and remove them; return whether that went well."""
        try:
            self._write(storage, _each_once(pa.concat_tables(found.values())))
        except Exception as exc:  # noqa: BLE001 - whatever a file system raises
            _log.warning(
                "%d files of the index of %s at %s cannot be joined: %s. Each read fetches all of "
                "them. Check the location and its permissions.",
                len(found), storage.topic_partition, self._location.url, scrubbed(exc),
            )  # fmt: skip
            return False
        self._remove(found)
        return True

    def _fitting(self, path: str, opened: Any, storage: Storage, *, keys: bool) -> pa.Table | None:
        """Read the zones of a file that fit; remove it if there is none."""
        try:
            file = parquet.ParquetFile(opened, page_checksum_verification=True)
            said = file.schema_arrow.metadata or {}
            if said.get(b"version") != _VERSION:
                _log.warning("%s is of another version of the index. It is not used.",
                             redacted(path))  # fmt: skip
                return None
            if not file.schema_arrow.equals(_SCHEMA):
                raise pa.ArrowInvalid("it has other columns")
            columns = [name for name in _SCHEMA.names if keys or name != "keys"]
            table = file.read(columns) if _is_of(storage, said) else _SCHEMA.empty_table()
            fitting = _that_fit(table, storage)
            fitting.validate(full=True)
        except Exception as exc:
            if isinstance(exc, OSError) and not isinstance(opened, BytesIO):
                raise  # an error of the file system, so the file may be whole
            _log.warning("%s is damaged: %s. It is removed.", redacted(path), scrubbed(exc))
            self._remove([path])
            return None
        if fitting.num_rows < table.num_rows or not fitting.num_rows:
            _log.info(
                "%d zones at %s do not fit the ledgers of %s: those were removed, or the topic was "
                "created again.",
                table.num_rows - fitting.num_rows, redacted(path), storage.topic_partition,
            )  # fmt: skip
        if not fitting.num_rows:
            self._remove([path])
            return None
        return fitting

    def _listed(self, topic_partition: TopicPartition) -> dict[str, int]:
        """Return the files of a topic partition, and their sizes in bytes."""
        self._files.invalidate_cache()
        try:
            found = self._files.ls(self._folder(topic_partition), detail=True)
        except FileNotFoundError:
            return {}
        return {one["name"]: one["size"] for one in found if one["name"].endswith(SUFFIX)}

    def _write(self, storage: Storage, table: pa.Table) -> None:
        folder = self._folder(storage.topic_partition)
        self._files.makedirs(folder, exist_ok=True)
        content = BytesIO()
        parquet.write_table(table, content, compression="zstd", write_page_checksum=True)
        path = f"{folder}/{table['ledger'][0]}-{table['first'][0]}-{uuid.uuid4()}{SUFFIX}"
        if not isinstance(self._files, LocalFileSystem):
            self._files.pipe_file(path, content.getvalue())
            return
        self._files.pipe_file(f"{path}.new", content.getvalue())
        self._files.mv(f"{path}.new", path)

    def _remove(self, paths: Iterable[str]) -> None:
        for path in paths:
            self._remove_one(path)

    def _remove_one(self, path: str) -> None:
        try:
            self._files.rm_file(path)
        except FileNotFoundError:
            pass  # another plan removed it
        except Exception as exc:  # noqa: BLE001 - whatever a file system raises
            _log.warning(
                "%s cannot be removed: %s. Each plan reads it again.", redacted(path), scrubbed(exc)
            )

    def _folder(self, topic_partition: TopicPartition) -> str:
        return f"{self._root}/{quote(topic_partition.name, safe='')}"


def _metadata(storage: Storage) -> dict[bytes, bytes]:
    return {
        b"version": _VERSION,
        b"topic_partition": storage.topic_partition.name.encode(),
        b"created": storage.created.encode(),
    }


def _is_of(storage: Storage, said: Mapping[bytes, bytes]) -> bool:
    return _metadata(storage).items() <= said.items()


def _table(storage: Storage, zones: Sequence[Zone]) -> pa.Table:
    """Return zones as a table of the index."""
    rows = []
    for zone in zones:
        closed = storage.closed[zone.ledger]
        times = *(zone.published or (None, None)), *(zone.events or (None, None))
        rows.append({
            "ledger": zone.ledger, "ledger_entries": closed.entries,
            "ledger_bytes": closed.size_bytes, "first": zone.first, "end": zone.end,
            "rows": zone.rows, "schema_versions": zone.schema_versions, "keys": zone.keys,
            **dict(zip(_TIMES, times, strict=True)),
        })  # fmt: skip
    return pa.Table.from_pylist(rows, _SCHEMA.with_metadata(_metadata(storage)))


def _that_fit(table: pa.Table, storage: Storage) -> pa.Table:
    """Return the zones whose ledger still has the entries and bytes that the zone names."""
    names = ("ledger", "ledger_entries", "ledger_bytes")
    rows = zip(*(table[name].to_pylist() for name in names), strict=True)
    fits = [storage.closed.get(ledger) == (entries, size) for ledger, entries, size in rows]
    return table if all(fits) else table.filter(pa.array(fits, pa.bool_()))


def _each_once(table: pa.Table) -> pa.Table:
    """Return each zone once, if several reads have made it."""
    rows = list(zip(*(table[name].to_pylist() for name in ("ledger", "first", "end")), strict=True))
    kept = sorted({row: number for number, row in enumerate(rows)}.values())
    return table if len(kept) == len(rows) else table.take(kept)


def _zones(table: pa.Table) -> Iterator[Zone]:
    names = [name for name in table.column_names if not name.startswith("ledger_")]
    columns = {
        name: (table[name].cast(pa.int64()) if name in _TIMES else table[name]).to_pylist()
        for name in names
    }
    for values in zip(*columns.values(), strict=True):
        row = dict(zip(names, values, strict=True))
        published, events = (
            None if row[f"{kind}_min"] is None else (row[f"{kind}_min"], row[f"{kind}_max"])
            for kind in ("publish", "event")
        )
        yield Zone(
            row["ledger"], row["first"], row["end"], row["rows"], published, events,
            tuple(row["schema_versions"]), row.get("keys"),
        )  # fmt: skip
