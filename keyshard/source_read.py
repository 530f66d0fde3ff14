"""Bounded reads of a source's topics, from Python: stored messages as Arrow record batches."""

from __future__ import annotations

import os
from collections.abc import Collection, Generator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from keyshard.base_error import placed
from keyshard.config.connection import CLIENT, Connection
from keyshard.config.segments import BYTES_IN_FLIGHT, Segments, check_bytes_in_flight
from keyshard.config.source import SourceConfig
from keyshard.core.metadata_columns import check_known, check_transport
from keyshard.core.option_checks import check_integer, is_key, suggesting
from keyshard.core.position.read_bounds import bound_text
from keyshard.core.position.split import Split, cut, divided
from keyshard.core.position.zones import Wanted
from keyshard.errors import ConfigError
from keyshard.reading.read_report import ReadReport, SpansByStart, planned
from keyshard.redaction import shown

if TYPE_CHECKING:
    import pyarrow as pa

SPLIT_BYTES = 256 * 1024 * 1024
"""Stored bytes after which a read checks again what is stored, reports, and saves its index."""
PARTS_MAX = 1_000_000
"""Most parts of a read."""


class SourceReads:
    """The method of :class:`keyshard.KeyShardSource` for bounded reads."""

    @suggesting
    def read(
        self,
        *,
        start: str | int | datetime | Mapping[Any, Any] = "earliest",
        end: str | int | datetime | Mapping[Any, Any] = "latest",
        keys: Collection[str] | None = None,
        columns: Sequence[str] | None = None,
        disorder_max_s: float | None = None,
        segments: Segments | None = None,
        ledger_index: str | None = None,
        bytes_in_flight_max: int = BYTES_IN_FLIGHT,
    ) -> SourceRead:
        """Plan a read of the stored messages between two bounds.

        ::

            with source.read(start="2026-11-20T00:00+01:00", end="2026-11-21T00:00+01:00") as rows:
                for batch in rows:
                    store(batch)

        The call fixes what the read contains; each iteration reads the same rows. The read
        acknowledges nothing, uses no subscription and leaves none behind. The source may run
        meanwhile. Of its options, the topics, the connection, ``operation_timeout_ms`` and
        ``fail_on_data_loss`` apply; ``admin_url`` is required.

        A bound is one of these, or a dict with one of these for each topic partition by name:

        - ``"earliest"``, or ``"latest"`` (after the last entry now);
        - a position ``"ledger:entry"`` or ``"ledger:entry:index"``, as in the column
          ``__messageId``; of a scalable topic only in a dict, by the names of segments;
        - a time: a ``datetime``, a text such as ``"2026-11-21T08:00+01:00"``, or an ``int`` of
          milliseconds since 1970. Without a zone it is UTC.

        The end is exclusive: the end of one read is the start of the next. Times are compared with
        publish times (column ``__publishTime``), which come from the producer's clock. A producer
        batch has one publish time.

        Times select rows exactly. Publish times are not in the order of entries: clocks differ, and
        messages that are sent again or replicated keep their time. So by default a read with times
        looks at every stored entry. With ``disorder_max_s`` it reads only what may lie in the
        bounds, which the broker finds. It may then miss messages whose publish time is off by more.

        Args:
            start: Start of the read, inclusive.
            end: End of the read, exclusive.
            keys: Only messages with one of these partition keys; ``None``: all.
            columns: Columns to read, in this order, of
                ``keyshard.columns.record_batches.COLUMNS``. The default is its ``SCHEMA`` and the
                ``metadata_columns`` of the source. A decoder needs its ``raw_columns``.
            disorder_max_s: How far publish times go back at most in a topic partition, seconds.
                Allow for messages that are sent again after an outage, for example 3600.
            segments: Where closed ledgers are read: ``Segments("auto")`` reads them from bookies,
                and ``Segments(offloads="s3://bucket")`` offloaded ones from their store, without
                the broker. Default: by the broker.
            ledger_index: Path or fsspec URL of a folder, such as ``s3://bucket/index``, for an
                index of closed ledgers. The first read of a ledger writes the bounds of its times,
                and hashes of its keys. Later reads leave out what cannot match their times and
                keys.
            bytes_in_flight_max: Most bytes of entries that a loop receives ahead, 1 MiB to 1 GiB.
                Raise it for bookies or stores that are far away. Default: 32 MiB.

        Raises:
            ConfigError: A bound, a column or an option is wrong, or there is no ``admin_url``.
            TopicNotFoundError: A topic does not exist.
            DataLossTrimmedError, PositionAheadError, TopicRecreatedError: The entry of a position
                is not stored.
            BrokerError: The broker or the admin interface cannot be reached, or refuses.
        """
        from keyshard.columns.record_batches import SCHEMA  # noqa: PLC0415 - few sources need it
        from keyshard.reading.split_planner import plan_read  # noqa: PLC0415

        assert isinstance(self, SourceConfig)
        check_bytes_in_flight(bytes_in_flight_max)
        names = wanted_columns(columns, self)
        wanted = wanted_keys(keys)
        with placed(self.place):
            splits = plan_read(
                self, start, end, disorder_max_s=disorder_max_s, segments=segments,
                ledger_index=ledger_index, wanted=Wanted(keys=wanted),
            )  # fmt: skip
        return SourceRead(
            self.how_to_connect(), splits, names or SCHEMA.names, keys=wanted,
            fail_on_data_loss=self.fail_on_data_loss, segments=segments, ledger_index=ledger_index,
            bytes_in_flight_max=bytes_in_flight_max,
        )  # fmt: skip


class SourceRead:
    """Stored messages between two bounds, as Arrow record batches. Made by ``KeyShardSource.read``.

    Each iteration connects, reads all rows in the thread of its loop, and disconnects. Only the
    connection has threads of its own. The rows of a topic partition are in its order, one topic
    partition after the other.
    A batch has at most 10,000 rows and about 8 MiB of columns, unless one entry is larger. A read
    holds at most one batch, and about ``bytes_in_flight_max`` of entries that were received before
    their turn.

    An iteration that ends early closes its connection when nothing refers to it, or at the end of a
    ``with`` block over the read. It raises these errors:

    - ``DataLossTrimmedError``, ``TopicRecreatedError``: entries were removed after the call of
      ``read``. If ``fail_on_data_loss`` of the source is false, they are left out with a warning.
    - ``UnreadableEntryError``, ``ChunkedMessageError``: an entry cannot be read, or a message is
      encrypted or chunked.
    - ``ReplayTimeoutError``: nothing came for ``operation_timeout_ms``.
    - ``BookieReadError``: with ``Segments("bookies")``, neither a bookie nor the store of offloads
      returned an entry.
    - ``BrokerError``: the broker or the admin interface cannot be reached, or refuses.

    The read is an Arrow stream for other libraries, without a copy: ``pyarrow.table(rows)`` and
    ``pyarrow.RecordBatchReader.from_stream(rows)``. Errors come as their texts there.

    It can be pickled, also for another machine. The pickle has the credentials of the connection.
    """

    def __init__(
        self,
        connection: Connection,
        splits: Sequence[Split],
        columns: Sequence[str],
        *,
        keys: Collection[str] | None = None,
        fail_on_data_loss: bool = True,
        segments: Segments | None = None,
        ledger_index: str | None = None,
        bytes_in_flight_max: int = BYTES_IN_FLIGHT,
    ) -> None:
        self._connection = connection
        self._splits = tuple(splits)
        self._columns = tuple(columns)
        self._options: dict[str, Any] = {
            "keys": keys,
            "fail_on_data_loss": fail_on_data_loss,
            "segments": segments,
            "ledger_index": ledger_index,
            "bytes_in_flight_max": bytes_in_flight_max,
        }
        self._pid = os.getpid()
        self._forget()

    def _forget(self) -> None:
        """Start without iterations and reports: a read has neither when it is made or unpickled."""
        self._spans: SpansByStart = {}
        self._open: WeakSet[Generator[pa.RecordBatch, None, None]] = WeakSet()

    @property
    def schema(self) -> pa.Schema:
        """Columns of the batches."""
        from keyshard.columns.record_batches import select  # noqa: PLC0415 - loads pyarrow

        return select(self._columns)

    @property
    def ends(self) -> dict[str, str]:
        """Position by topic partition at which the read ends: ``start`` of the next read.

        As JSON, it is a ``starting_position`` of a source.

        Raises:
            ConfigError: The read ends at a time.
        """
        found: dict[str, str] = {}
        for one in self._splits:
            if isinstance(one.end, int):
                raise ConfigError(
                    f"The read of {one.topic_partition} ends at {bound_text(one.end)}, a publish "
                    "time, which is not a position: earlier messages may be stored after it.",
                    "Use a position or 'latest' as end.",
                )
            if one.end is not None:
                found[one.topic_partition.name] = bound_text(one.end)
        return found

    @property
    def plan(self) -> ReadReport:
        """Entries by the origin from which they will be read, and those that an index rules out."""
        return planned(self._splits)

    @property
    def report(self) -> ReadReport:
        """Entries that were read so far by their origin, and why the broker was asked.

        It grows by about 256 MiB of stored entries at a time. Another iteration replaces what the
        first one reported.
        """
        return ReadReport.of(dict(self._spans))

    def split(self, parts: int) -> list[SourceRead]:
        """Divide the read between threads, processes or machines.

        ::

            with ProcessPoolExecutor(8) as pool:
                list(pool.map(store, rows.split(64)))

        Args:
            parts: Most parts, 1 to 1,000,000. Their number does not depend on the number of topic
                partitions.

        Returns:
            Reads of about equal stored bytes, in order, which together are this read. At least one.

        Raises:
            ConfigError: ``parts`` is outside its limits.
        """
        check_integer("parts", parts, 1, PARTS_MAX)
        return [
            SourceRead(self._connection, splits, self._columns, **self._options)
            for splits in divided(self._splits, parts)
        ]

    def __iter__(self) -> Generator[pa.RecordBatch, None, None]:
        batches = self._batches()
        self._open.add(batches)
        return batches

    def _batches(self) -> Generator[pa.RecordBatch, None, None]:
        from keyshard.reading.split_reader import read_splits  # noqa: PLC0415 - loads pyarrow

        if self._connection.in_memory and self._pid != os.getpid():
            raise ConfigError(
                f"{self._connection.service_url} is an in-memory cluster of another process.",
                "Read it there, or use the URL of a broker.",
            )
        size_bytes = sum(one.size_bytes for one in self._splits)
        splits = cut(self._splits, -(-size_bytes // SPLIT_BYTES))
        ruled_out = [one for one in self._splits if not one.spans]
        yield from read_splits(
            self._connection, [*ruled_out, *splits], self._columns, **self._options,
            report=lambda found: self._spans.update(found.by_start()),
        )  # fmt: skip

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        import pyarrow as pa  # noqa: PLC0415

        stream = pa.RecordBatchReader.from_batches(self.schema, iter(self))
        return stream.__arrow_c_stream__(requested_schema)

    def close(self) -> None:
        """End iterations that have not ended, and close their connections. Idempotent.

        The end of a ``with`` block calls it. Call it in the thread that iterates.
        """
        for batches in tuple(self._open):
            batches.close()

    def __enter__(self) -> SourceRead:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _OF_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def __repr__(self) -> str:
        where = sorted({one.topic_partition.topic for one in self._splits})
        entries = sum(one.entries for one in self._splits)
        return f"SourceRead({shown(where)}, {entries:,} entries)"


_OF_PROCESS = ("_spans", "_open")


def wanted_keys(given: object) -> frozenset[str] | None:
    """Check the argument ``keys`` of a read.

    Raises:
        ConfigError: It is no collection of keys.
    """
    if given is None:
        return None
    if isinstance(given, str) or not isinstance(given, Collection) or not given or not all(
        map(is_key, given)
    ):  # fmt: skip
        raise ConfigError(f"keys is {shown(given)}.", "Write a list of keys, such as ['k1', 'k2'].")
    return frozenset(given)


def wanted_columns(given: object, source: SourceConfig) -> list[str] | None:
    """Check the argument ``columns`` of a read; ``None`` is the default of all reads.

    Raises:
        ConfigError: A column does not exist, or the transport cannot provide it.
    """
    from keyshard.columns.record_batches import COLUMNS, columns_of  # noqa: PLC0415

    if given is None:
        return columns_of(source.metadata_columns) if source.metadata_columns else None
    wanted = f"Name some of {', '.join(COLUMNS.names)}."
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise ConfigError(f"columns is {shown(given)}.", wanted)
    for name in given:
        check_known(name)
    unknown = [name for name in given if name not in COLUMNS.names]
    if unknown or len(set(given)) < len(given):
        what = f"has no column {shown(unknown[0])}" if unknown else "has a column twice"
        raise ConfigError(f"columns is {shown(given)}, which {what}.", wanted)
    check_transport(given, by_client=source.transport == CLIENT)
    return list(given)
