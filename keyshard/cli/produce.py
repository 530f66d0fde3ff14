"""``keyshard produce``: publish a load whose order and completeness can be checked."""

# ruff: noqa: PLC0415 - each command imports its modules when it runs, so that --help is fast.
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, cast

import typer

from keyshard.cli.connecting import with_connection
from keyshard.config.connection import Connection


@with_connection
def produce(  # noqa: PLR0917 - one argument per option
    topic: Annotated[
        str, typer.Argument(help="Topic to publish to: orders, or tenant/namespace/topic.")
    ],
    messages: Annotated[int, typer.Option(help="Number of messages.")] = 100_000,
    keys: Annotated[int, typer.Option(help="Number of different keys.")] = 1_000,
    partitions: Annotated[
        int, typer.Option(help="Number of partitions. The topic is created if it does not exist.")
    ] = 5,
    zipf: Annotated[
        float | None,
        typer.Option(
            help="Skew of the keys: the exponent of a Zipf distribution, such as 1.1. Default: no "
            "skew."
        ),
    ] = None,
    size: Annotated[int, typer.Option(help="Size of each value, bytes.")] = 100,
    rate: Annotated[
        float | None, typer.Option(help="Messages per second. Default: as many as possible.")
    ] = None,
    batching: Annotated[
        str,
        typer.Option(
            help="Batching of the producer: keyed (one key in a batch), none, or default (batches "
            "mix keys)."
        ),
    ] = "keyed",
    entry_messages: Annotated[
        int | None,
        typer.Option(help="Messages of one key in an entry. Default: as the batching decides."),
    ] = None,
    key_kind: Annotated[
        str, typer.Option(help="Field that carries the key: key, ordering, or none.")
    ] = "key",
    seed: Annotated[int, typer.Option(help="Seed of the random keys.")] = 0,
    *,
    connection: Connection,
) -> None:
    """Publish messages whose values contain their key and a sequence number.

    Each value starts with 'key:seq:'. The number seq counts the messages of the key from 0, so a
    reader finds lost, repeated and reordered messages.
    """
    from keyshard.testing.verify.workloads import (
        Batching,
        KeyKind,
        Workload,
        create_partitioned_topic,
    )
    from keyshard.testing.verify.workloads import produce as run

    workload = Workload(
        messages=messages,
        keys=keys,
        zipf=zipf,
        size_bytes=size,
        rate_per_s=rate,
        batching=cast("Batching", batching),
        entry_messages=entry_messages,
        key_kind=cast("KeyKind", key_kind),
        seed=seed,
    )
    create_partitioned_topic(connection, topic, partitions)
    with _progress(f"Publishing to {topic}", messages) as progress:
        report = run(workload, connection, topic, progress=progress)
    typer.echo(
        f"Published {report.sent:,} messages with {len(report.per_key):,} keys to {topic} in "
        f"{report.seconds:.1f} s: {report.rate_per_s:,.0f} messages/s."
    )


@contextmanager
def _progress(title: str, messages: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar in a terminal; yield the function that advances it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    errors = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        Remaining(),
        console=errors,
        disable=not errors.is_terminal,
    ) as bars:
        task = bars.add_task(title, total=messages)
        yield lambda count: bars.update(task, advance=count)
