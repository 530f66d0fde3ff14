"""Bounded reads of topics as Ray datasets."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from keyshard.config.segments import BYTES_IN_FLIGHT, Segments, check_bytes_in_flight
from keyshard.config.source import SourceConfig
from keyshard.core.option_checks import check_integer, did_you_mean
from keyshard.core.position.zones import Wanted
from keyshard.errors import ConfigError
from keyshard.reading.split_planner import plan_read
from keyshard.redaction import shown
from keyshard.source_read import wanted_columns, wanted_keys
from ray_adapter.read_reports import ReadReports

if TYPE_CHECKING:
    from ray.data import Dataset

    from keyshard.source import KeyShardSource

BLOCKS_MAX = 1_000_000
"""Most blocks and read tasks of a dataset."""
_COUNTS = ("override_num_blocks", "concurrency", "parallelism")
"""Options of Ray that count blocks or tasks."""
_OWN = (
    "start", "end", "keys", "columns", "disorder_max_s", "segments", "ledger_index",
    "bytes_in_flight_max", "reports",
)  # fmt: skip


def read(
    source: KeyShardSource,
    *,
    start: str | int | datetime | Mapping[Any, Any] = "earliest",
    end: str | int | datetime | Mapping[Any, Any] = "latest",
    keys: Collection[str] | None = None,
    columns: Sequence[str] | None = None,
    disorder_max_s: float | None = None,
    segments: Segments | None = None,
    ledger_index: str | None = None,
    bytes_in_flight_max: int = BYTES_IN_FLIGHT,
    reports: ReadReports | None = None,
    **options: Any,
) -> Dataset:
    """Return a Ray dataset of the messages between two bounds.

    ::

        yesterday = ray_adapter.read(
            source, start="2026-11-20T00:00+01:00", end="2026-11-21T00:00+01:00"
        )

    The call fixes what the dataset contains; later runs read the same. The rows are read when the
    dataset runs. The number of read tasks does not depend on the number of topic partitions. The
    rows of one task are in the order of their topic partition. The read acknowledges nothing, uses
    no subscription and leaves none behind. A task that Ray runs again reads the same rows.

    A bound is one of these, or a dict with one of these for each topic partition by name:

    - ``"earliest"``, or ``"latest"`` (after the last entry now);
    - a position ``"ledger:entry"`` or ``"ledger:entry:index"``, as in the column ``__messageId``;
    - a time: a ``datetime``, a text such as ``"2026-11-21T08:00+01:00"``, or an ``int`` of
      milliseconds since 1970. Without a zone it is UTC.

    The end is exclusive: the end of one read is the start of the next. Times are compared with
    publish times (column ``__publishTime``), which come from the producer's clock. A producer batch
    has one publish time.

    Times select rows exactly. Publish times are not in the order of entries: clocks differ, and
    messages that are sent again or replicated keep their time. So by default a read with times
    looks at every stored entry. With ``disorder_max_s`` it reads only what may lie in the bounds,
    which the broker finds. It may then miss messages whose publish time is off by more.

    Args:
        source: Topics and connection; ``admin_url`` is required. Of the other options
            ``fail_on_data_loss`` applies: whether entries that are trimmed before they are read
            fail the dataset, or are skipped with a warning.
        start: Start of the read, inclusive.
        end: End of the read, exclusive.
        keys: Only messages with one of these partition keys; ``None``: all.
        columns: Columns to read, in this order, of ``keyshard.columns.record_batches.COLUMNS``. The
            default is its ``SCHEMA`` and the ``metadata_columns`` of the source.
            ``Dataset.select_columns`` prunes as well.
        disorder_max_s: How far publish times go back at most in a topic partition, seconds. Allow
            for messages that are sent again after an outage, for example 3600.
        segments: Where closed ledgers are read: ``Segments("auto")`` reads them from bookies, and
            ``Segments(offloads="s3://bucket")`` offloaded ones from their store, without the
            broker. Default: by the broker. The name of the read in Ray's progress shows how many
            ledgers are planned to be read without the broker.
        ledger_index: Path or fsspec URL of a folder that all tasks reach, such as
            ``s3://bucket/index``, for an index of closed ledgers. The first read of a ledger writes
            the bounds of its times, and hashes of its keys. Later reads leave out what cannot match
            their times and keys.
        bytes_in_flight_max: Most bytes of entries that a task receives ahead, 1 MiB to 1 GiB.
            Raise it for bookies or stores that are far away. Default: 32 MiB.
        reports: Collects numbers of entries by origin (bookies, stores or the broker), and the
            reasons why the broker was asked.
        **options: Options of :func:`ray.data.read_datasource`, such as ``override_num_blocks``,
            ``concurrency`` and ``ray_remote_args``. Other names are refused.

    Raises:
        ConfigError: A bound, a column or an option is wrong, or there is no ``admin_url``.
        TopicNotFoundError: A topic does not exist.
        DataLossTrimmedError: The entry of a position is no longer stored.
        BrokerError: The broker cannot be reached, or refuses.
    """
    from ray.data import read_datasource  # noqa: PLC0415 - takes seconds

    from ray_adapter.datasource import KeyShardDatasource  # noqa: PLC0415 - imports ray.data

    if not isinstance(source, SourceConfig):
        raise ConfigError(f"read() got {shown(source)}.", "Pass a KeyShardSource.")
    if source.in_memory:
        raise ConfigError(
            f"{source.service_url} is an in-memory cluster of this process, which Ray's workers "
            "cannot reach.",
            "Use the URL of a broker.",
        )
    _check_options(options, read_datasource)
    if not isinstance(reports, ReadReports | None):
        raise ConfigError(
            f"reports is {shown(reports)}.", "Give a ray_adapter.ReadReports or None."
        )
    check_bytes_in_flight(bytes_in_flight_max)
    names = wanted_columns(columns, source)
    wanted = wanted_keys(keys)
    stretches = plan_read(
        source, start, end, disorder_max_s=disorder_max_s, segments=segments,
        ledger_index=ledger_index, wanted=Wanted(keys=wanted),
    )  # fmt: skip
    datasource = KeyShardDatasource(
        source.how_to_connect(),
        stretches,
        names,
        keys=wanted,
        fail_on_data_loss=source.fail_on_data_loss,
        segments=segments,
        ledger_index=ledger_index,
        bytes_in_flight_max=bytes_in_flight_max,
        reports=reports,
    )
    dataset: Dataset = read_datasource(datasource, **options)
    return dataset


def _check_options(given: Mapping[str, Any], read_datasource: Callable[..., Any]) -> None:
    """Refuse options that Ray would pass on unchecked, and numbers at which it would fail later."""
    of_ray = inspect.signature(read_datasource).parameters.values()
    passed_on = {one.name for one in of_ray if one.kind is one.KEYWORD_ONLY}
    for name in given:
        if name not in passed_on:
            hint = did_you_mean(name, [*_OWN, *sorted(passed_on)])
            hint = f"{hint} " if hint else ""
            raise ConfigError(
                f"read() has no option {shown(name)}.",
                f"{hint}Its own options are {', '.join(_OWN)}. It also passes the options of "
                "ray.data.read_datasource.",
            )
    for name in _COUNTS:
        value = given.get(name)
        if value is not None and (name, value) != ("parallelism", -1):
            check_integer(name, value, 1, BLOCKS_MAX)
