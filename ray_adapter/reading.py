"""Topics of a bounded length as a Ray dataset."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from keyshard.arrow.columns import COLUMNS, columns_of
from keyshard.config.connection import CLIENT
from keyshard.config.source import SourceConfig
from keyshard.coordinator.bounded import plan_read
from keyshard.core.metadata_columns import check_known, check_transport
from keyshard.core.option_checks import check_integer, did_you_mean
from keyshard.errors import ConfigError
from keyshard.redaction import shown

if TYPE_CHECKING:
    from ray.data import Dataset

    from keyshard.source import KeyShardSource

BLOCKS_MAX = 1_000_000
"""Most blocks and read tasks of a dataset."""
_COUNTS = ("override_num_blocks", "concurrency", "parallelism")
"""Options of Ray that are numbers of blocks or tasks."""
_OWN = ("start", "end", "columns", "disorder_max_s")


def read(
    source: KeyShardSource,
    *,
    start: str | int | datetime | Mapping[Any, Any] = "earliest",
    end: str | int | datetime | Mapping[Any, Any] = "latest",
    columns: Sequence[str] | None = None,
    disorder_max_s: float | None = None,
    **options: Any,
) -> Dataset:
    """A Ray dataset of what topics hold between two bounds.

    ::

        yesterday = ray_adapter.read(
            source, start="2026-11-20T00:00+01:00", end="2026-11-21T00:00+01:00"
        )

    What is read is fixed at the call: later runs of the dataset read the same. Rows are read when
    the dataset runs, by read tasks whose number does not depend on that of topic partitions; those
    of one task come in the order of their topic partition. Nothing is acknowledged, no subscription
    is used or left behind, and a task that Ray runs again gives the same rows.

    A bound is ``"earliest"``, ``"latest"`` (behind the last entry now), a time, a position
    ``"ledger:entry"`` or ``"ledger:entry:index"`` as column ``__messageId`` has it, or a dict with
    one of these for each topic partition by its name. The end is exclusive: the end of one read is
    the start of the next. A time is a ``datetime``, a text such as ``"2026-11-21T08:00+01:00"`` or
    an ``int`` of milliseconds since 1970; without a zone it is UTC. It is compared with publish
    times, column ``__publishTime``: what the producer's clock said, for a producer batch one time.

    Times select rows exactly, and by default everything that is stored is looked at for that:
    publish times are not in the order of entries, since clocks differ and what is sent again, or
    replicated from another cluster, keeps its time. With ``disorder_max_s`` only what may lie in
    the bounds is read, found by the broker; messages whose publish time is off by more than you
    said may then be missed.

    Args:
        source: Topics and connection; ``admin_url`` is needed. Of its other options
            ``fail_on_data_loss`` holds: whether entries that are trimmed before they are read fail
            the dataset, or are left out with a warning.
        start: Where the rows begin, inclusive.
        end: Where they end, exclusive.
        columns: Names of the columns wanted, in their order, of
            ``keyshard.arrow.columns.COLUMNS``; by default all of its ``SCHEMA``, then the source's
            ``metadata_columns``. ``Dataset.select_columns`` prunes as well.
        disorder_max_s: How far publish times go back at most in a topic partition, seconds; with
            some allowance for what is sent again after an outage, such as 3600.
        **options: Those of :func:`ray.data.read_datasource`, such as ``override_num_blocks``,
            ``concurrency`` and ``ray_remote_args``; no other names.

    Raises:
        ConfigError: A bound, a column or an option is wrong, or there is no ``admin_url``.
        TopicNotFoundError: A topic does not exist.
        DataLossTrimmedError: What a position names is no longer stored.
        BrokerError: The broker cannot be reached, or refuses.
    """
    from ray.data import read_datasource  # noqa: PLC0415 - takes seconds

    from ray_adapter.datasource import KeyShardDatasource  # noqa: PLC0415 - imports ray.data

    if not isinstance(source, SourceConfig):
        raise ConfigError(f"read() was given {shown(source)}; give it a KeyShardSource.")
    if source.in_memory:
        raise ConfigError(
            f"{source.service_url} is a cluster of this process, which Ray's workers cannot reach. "
            "Give the URL of a broker."
        )
    _check_options(options, read_datasource)
    names = _columns(columns, source)
    stretches = plan_read(source, start, end, disorder_max_s=disorder_max_s)
    datasource = KeyShardDatasource(
        source.how_to_connect(), stretches, names, fail_on_data_loss=source.fail_on_data_loss
    )
    dataset: Dataset = read_datasource(datasource, **options)
    return dataset


def _check_options(given: Mapping[str, Any], read_datasource: Callable[..., Any]) -> None:
    """Refuse options that Ray would pass on unread, and numbers that it fails at later."""
    of_ray = inspect.signature(read_datasource).parameters.values()
    passed_on = {one.name for one in of_ray if one.kind is one.KEYWORD_ONLY}
    for name in given:
        if name not in passed_on:
            hint = did_you_mean(name, [*_OWN, *sorted(passed_on)])
            hint = f"{hint} " if hint else ""
            raise ConfigError(
                f"read() has no option {shown(name)}. {hint}Its own options are "
                f"{', '.join(_OWN)}; it passes those of ray.data.read_datasource on."
            )
    for name in _COUNTS:
        value = given.get(name)
        if value is not None and (name, value) != ("parallelism", -1):
            check_integer(name, value, 1, BLOCKS_MAX)


def _columns(given: object, source: SourceConfig) -> list[str] | None:
    if given is None:
        return columns_of(source.metadata_columns) if source.metadata_columns else None
    wanted = f"name some of {', '.join(COLUMNS.names)}"
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise ConfigError(f"columns is {shown(given)}; {wanted}.")
    for name in given:
        check_known(name)
    unknown = [name for name in given if name not in COLUMNS.names]
    if unknown or len(set(given)) < len(given):
        what = f"has no column {shown(unknown[0])}" if unknown else "has a column twice"
        raise ConfigError(f"columns is {shown(given)}, which {what}; {wanted}.")
    check_transport(given, by_client=source.transport == CLIENT)
    return list(given)
