"""How ``keyshard status`` shows open sinks, and workers that host consumers."""

# ruff: noqa: PLC0415 - rich is imported when it is needed, so that --help is fast.
from __future__ import annotations

from typing import TYPE_CHECKING

from keyshard.cli.connecting import OTHER_S
from keyshard.cli.output import ERROR_MAX, duration, newest_error, pace, plain, plural
from keyshard.errors import ControlError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rich.console import RenderableType

    from keyshard.control import RunningSource
    from keyshard.observe.sink_status import SinkStatus
    from keyshard.workers.status import WorkerStatus

_TOPICS_MAX = 3
_CONSUMERS_MAX = 50
"""Most consumers that are listed; those in trouble come first."""


def sink_view(status: SinkStatus) -> RenderableType:
    """Return all facts about a sink."""
    from rich.console import Group
    from rich.text import Text

    counters, rates = status["counters"], status["rates"]
    parts = [
        Text(
            f"{status['state']}: sink {status['name']!r} to {_topics(status)} at "
            f"{status['serviceUrl']}: {status['transport']}, pid {status['pid']} on "
            f"{status['host']}"
        ),
        Text(f"unconfirmed {_unconfirmed(status)}; up for {duration(status['uptimeSeconds'])}"),
        Text(
            f"published {counters['published']:,} messages in {counters['entries']:,} entries, "
            f"{counters['bytes']:,} bytes; confirmed {counters['confirmed']:,}, failed "
            f"{counters['failed']:,}; {plural(counters['batches'], 'batch', 'batches')}, already "
            f"stored {counters['alreadyStored']:,}"
        ),
        Text(
            f"per second: published {pace(rates['published'])}, confirmed "
            f"{pace(rates['confirmed'])}, bytes {pace(rates['bytes'])}"
        ),
    ]
    if status["newestError"]:
        parts.append(Text(f"newest error: {newest_error(status['newestError'])}", style="yellow"))
    return Group(*parts)


def sinks_table(sinks: Sequence[RunningSource]) -> RenderableType:
    """Return a table with a row for each sink: its status, or why there is none."""
    columns = "sink", "topics", "state", "published/s", "unconfirmed", "uptime", "newest error"
    return _table(columns, sinks, _facts)


def _table(
    columns: Iterable[str],
    found: Sequence[RunningSource],
    facts: Callable[[RunningSource], list[str]],
) -> RenderableType:
    """Return a table with a row for each program in ``found``.

    Args:
        columns: Headings of the columns after the process id.
        found: Sinks or workers.
        facts: Returns the cells of a row after process id and name.
    """
    from rich.markup import escape
    from rich.table import Table

    table = Table("pid", *columns)
    for one in found:
        table.add_row(str(one.pid), *map(escape, (one.name, *facts(one))))
    return table


def _facts(one: RunningSource) -> list[str]:
    try:
        status: SinkStatus = one.ask("status", timeout_s=OTHER_S)
        with one.read():
            return [
                _topics(status), status["state"], pace(status["rates"]["published"]),
                _unconfirmed(status), duration(status["uptimeSeconds"]),
                newest_error(status["newestError"]),
            ]  # fmt: skip
    except ControlError as exc:
        return [one.topics, "?", "-", "-", "-", plain(exc.message)]


def _topics(status: SinkStatus) -> str:
    topics = status["topics"] or [status["topic"]]
    more = len(topics) - _TOPICS_MAX
    return plain(", ".join(topics[:_TOPICS_MAX])) + (f" and {more} more" if more > 0 else "")


def _unconfirmed(status: SinkStatus) -> str:
    found = status["unconfirmed"]
    oldest_s = found["oldestSeconds"]
    age = "" if oldest_s is None else f", oldest {oldest_s:.1f} s"
    return f"{found['messages']:,} messages{age}"


# -- Workers ---------------------------------------------------------------------------------------


def worker_view(status: WorkerStatus) -> RenderableType:
    """Return all facts about a worker."""
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    consumers, waiting, kept = status["consumers"], status["waiting"], status["kept"]
    parts: list[RenderableType] = [
        Text(
            f"{status['state']}: worker of {status['subscription']!r} at {status['serviceUrl']}, "
            f"pid {status['pid']} on {status['host']}, of the source with {_source_of(status)}"
        ),
        Text(
            f"{plural(len(consumers), 'consumer')}; up for {duration(status['uptimeSeconds'])}; "
            f"waiting {plural(waiting['entries'], 'entry', 'entries')} with "
            f"{waiting['messages']:,} messages, {waiting['bytes']:,} bytes; kept "
            f"{kept['messages']:,} messages, {kept['bytes']:,} bytes"
        ),
    ]
    if status["newestError"]:
        parts.append(Text(f"newest error: {newest_error(status['newestError'])}", style="yellow"))
    table = Table("topic", "partition", "slots", "connected", "messages", "bytes", "problem")
    first = sorted(consumers, key=lambda one: one["connected"] and not one["problem"])
    for one in first[:_CONSUMERS_MAX]:
        table.add_row(
            escape(one["topic"]), str(one["partition"]), escape(one["hashRange"]),
            "yes" if one["connected"] else "no", f"{one['messages']:,}", f"{one['bytes']:,}",
            escape(plain(one["problem"], ERROR_MAX)),
        )  # fmt: skip
    more = len(first) - _CONSUMERS_MAX
    parts += [table, *([Text(f"and {plural(more, 'consumer')} more")] if more > 0 else [])]
    return Group(*parts)


def workers_table(workers: Sequence[RunningSource]) -> RenderableType:
    """Return one line for each worker, with facts of its status, or why it has none."""
    columns = "worker of", "source", "state", "consumers", "waiting", "uptime", "newest error"
    return _table(columns, workers, _worker_facts)


def _worker_facts(one: RunningSource) -> list[str]:
    try:
        status: WorkerStatus = one.ask("status", timeout_s=OTHER_S)
        with one.read():
            return [
                _source_of(status), status["state"], f"{len(status['consumers']):,}",
                f"{status['waiting']['messages']:,} messages", duration(status["uptimeSeconds"]),
                newest_error(status["newestError"]),
            ]  # fmt: skip
    except ControlError as exc:
        return ["?", "?", "-", "-", "-", plain(exc.message)]


def _source_of(status: WorkerStatus) -> str:
    source = status["source"]
    return f"pid {source['pid']} on {source['host']}"
