"""``keyshard check``: judge a history, or record one on a broker and judge it."""

# ruff: noqa: PLC0415 - each command imports its modules when it runs, so that --help is fast.
from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keyshard.cli.connecting import with_connection
from keyshard.cli.output import JsonOption
from keyshard.config.connection import Connection
from keyshard.errors import ConfigError, KeyShardError

if TYPE_CHECKING:
    from keyshard.testing.verify.checkers import Verdict
    from keyshard.testing.verify.live import Progress

_PARTITIONS = 5
_BROKEN, _NO_VERDICT = 1, 2
_LIVE = "With --live"
_TopicOption = Annotated[
    str | None,
    typer.Option(
        help="Topic to publish to. It is created if it does not exist.", rich_help_panel=_LIVE
    ),
]
_PartitionsOption = Annotated[
    int | None,
    typer.Option(
        help=f"Number of partitions, if the topic is created. Default: {_PARTITIONS}.",
        rich_help_panel=_LIVE,
    ),
]
_HistoryOption = Annotated[
    Path | None,
    typer.Option(
        "--history", help="New file that stores the recorded history.", rich_help_panel=_LIVE
    ),
]
_DeliveriesOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=1_000_000,
        help="Most deliveries of one message. Default: 1, plus 1 for each fault before it.",
    ),
]
_LivenessOption = Annotated[
    float,
    typer.Option(
        min=0,
        max=86_400,
        help="Longest time from the last fault until every message is done, seconds.",
    ),
]


@with_connection
def check(  # noqa: PLR0917 - one argument per option
    history: Annotated[
        Path | None,
        typer.Argument(
            help="History to check, a file of JSON lines. docs/history.md describes its format."
        ),
    ] = None,
    live: Annotated[
        bool,
        typer.Option(
            "--live",
            help="Publish to a broker, consume with keyshard, and check the recorded history.",
        ),
    ] = False,
    topic: _TopicOption = None,
    append: Annotated[
        bool,
        typer.Option(
            "--append", help="Publish even if the topic contains messages.", rich_help_panel=_LIVE
        ),
    ] = False,
    messages: Annotated[
        int, typer.Option(help="Number of messages.", rich_help_panel=_LIVE)
    ] = 10_000,
    keys: Annotated[
        int, typer.Option(help="Number of different keys.", rich_help_panel=_LIVE)
    ] = 100,
    partitions: _PartitionsOption = None,
    parallelism: Annotated[
        int, typer.Option(help="Number of hash ranges.", rich_help_panel=_LIVE)
    ] = 10,
    out: _HistoryOption = None,
    timeout_s: Annotated[
        float, typer.Option(help="Deadline of the whole check, seconds.", rich_help_panel=_LIVE)
    ] = 120,
    deliveries_max: _DeliveriesOption = None,
    liveness_s: _LivenessOption = 60,
    as_json: JsonOption = False,
    *,
    connection: Connection,
) -> None:
    """Check a history of events for loss, order, duplicates, overlap and early acknowledgement.

    Exit status 0: every promise holds; 1: a promise is broken; 2: there is no verdict.
    """
    if live == (history is not None):
        raise ConfigError(
            "A check needs a history file or --live.",
            "Name a history file, or record one with --live and --topic.",
        )
    if not live and out is not None:
        raise ConfigError(
            "--history needs --live, which records a history.",
            "To check a file, name it without --history.",
        )
    try:
        with _history_file(history or out) as path:
            facts = {}
            if live:
                facts = _run_live(
                    topic, connection, path,
                    append=append, messages=messages, keys=keys, partitions=partitions,
                    parallelism=parallelism, timeout_s=timeout_s,
                )  # fmt: skip
            verdicts = _judge(path, deliveries_max, liveness_s)
    except KeyShardError as exc:
        typer.echo(str(exc), err=True)
        raise typer.Exit(_NO_VERDICT) from exc
    _print(verdicts, facts, as_json=as_json)
    if not all(verdict.holds for verdict in verdicts):
        raise typer.Exit(_BROKEN)


def _judge(path: Path, deliveries_max: int | None, liveness_s: float) -> list[Verdict]:
    from keyshard.testing.verify.checkers import check as judge
    from keyshard.testing.verify.history import read_history

    # No event is in a cycle, and a search for cycles among a million of them takes a second.
    gc.disable()
    return judge(list(read_history(path)), deliveries_max=deliveries_max, liveness_s=liveness_s)


@contextmanager
def _history_file(named: Path | None) -> Iterator[Path]:
    """Yield the named file, or a temporary one that is removed at the end."""
    if named is not None:
        yield named
        return
    with tempfile.TemporaryDirectory(prefix="keyshard-check-") as folder:
        yield Path(folder) / "history.jsonl"


def _run_live(
    topic: str | None,
    connection: Connection,
    path: Path,
    *,
    append: bool,
    messages: int,
    keys: int,
    partitions: int | None,
    parallelism: int,
    timeout_s: float,
) -> dict[str, Any]:
    """Record the history; return the figures of the check."""
    from keyshard.testing.verify.history import HistoryWriter
    from keyshard.testing.verify.live import LiveCheck

    if topic is None:
        raise ConfigError(
            "--live needs a topic to publish to.", "Add --topic, preferably with a new topic."
        )
    try:
        exists = path.exists()
    except OSError as exc:
        raise ConfigError(
            f"{path} cannot be written: {exc.strerror}.", "Name a new file."
        ) from None
    if exists:
        raise ConfigError(
            f"{path} already exists.", "Name a new file. To check this file, leave out --live."
        )
    plan = LiveCheck(
        topic=topic,
        connection=connection,
        messages=messages,
        keys=keys,
        partitions=partitions,
        parallelism=parallelism,
        append=append,
        timeout_s=timeout_s,
    )
    plan.prepare()
    with HistoryWriter(path) as history, _progress(messages) as progress:
        return plan.run(history, progress).to_dict()


@contextmanager
def _progress(messages: int) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    errors = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=errors, disable=not errors.is_terminal) as bars:
        sent = bars.add_task("Published", total=messages)
        done = bars.add_task("In committed batches", total=messages)

        def show(published: int, rows: int) -> None:
            bars.update(sent, completed=published)
            bars.update(done, completed=rows)

        yield show


def _print(verdicts: Sequence[Verdict], facts: dict[str, Any], *, as_json: bool) -> None:
    broken = [verdict for verdict in verdicts if not verdict.holds]
    if as_json:
        result = {
            "holds": not broken,
            "verdicts": [verdict.to_dict() for verdict in verdicts],
            **({"live": facts} if facts else {}),
        }
        typer.echo(json.dumps(result, indent=2))
        return
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("Promise", no_wrap=True)
    table.add_column("Verdict", no_wrap=True)
    table.add_column("Checked", overflow="fold")
    for verdict in verdicts:
        word, style = ("holds", "green") if verdict.checked else ("not checked", "yellow")
        text = verdict.message
        if not verdict.holds:
            word, style = "BROKEN", "bold red"
            text = "See below."
        table.add_row(verdict.name, f"[{style}]{word}[/{style}]", escape(text))
    console = Console(highlight=False)
    console.print(table)
    for verdict in broken:
        text = escape(verdict.message)
        console.print(f"[bold]{verdict.name}[/bold]: {text}", soft_wrap=True)
        for event in verdict.offending:
            console.print(f"  {escape(event.to_json())}", soft_wrap=True)
    if facts:
        console.print(_sentence(facts), soft_wrap=True)


def _sentence(facts: dict[str, Any]) -> str:
    late = "" if facts["in_time"] else " The deadline passed before all rows arrived."
    return (
        f"{facts['rows']:,} rows of {facts['sent']:,} messages in {facts['batches']} batches, "
        f"{facts['restarts']} restarts, {facts['duplicates_dropped']:,} redeliveries dropped, in "
        f"{facts['seconds']:.1f} s.{late}"
    )
