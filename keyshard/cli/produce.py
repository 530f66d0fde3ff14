"""``keyshard produce``: publish a load whose order and completeness can be checked."""

# ruff: noqa: PLC0415 - what a command needs is imported when it runs, so that --help is fast.
from __future__ import annotations

from typing import Annotated, cast

import typer

from keyshard.cli.connecting import with_connection
from keyshard.config.connection import Connection


@with_connection
def produce(  # noqa: PLR0917 - one argument per option
    topic: Annotated[str, typer.Argument(help="Topic: 'orders', or tenant/namespace/topic.")],
    messages: Annotated[int, typer.Option(help="Number of messages.")] = 100_000,
    keys: Annotated[int, typer.Option(help="Number of different keys.")] = 1_000,
    partitions: Annotated[
        int, typer.Option(help="Partitions of the topic, which is created when it is missing.")
    ] = 5,
    zipf: Annotated[
        float | None,
        typer.Option(help="Skew of the keys: exponent of a Zipf distribution, such as 1.1."),
    ] = None,
    size: Annotated[int, typer.Option(help="Bytes that each value is padded to.")] = 100,
    rate: Annotated[
        float | None, typer.Option(help="Messages per second; default: as fast as possible.")
    ] = None,
    batching: Annotated[
        str, typer.Option(help="keyed (a batch holds one key), none, or default (mixes keys).")
    ] = "keyed",
    entry_messages: Annotated[
        int | None,
        typer.Option(help="Messages of one key per entry; default: what batching makes of it."),
    ] = None,
    key_kind: Annotated[
        str, typer.Option(help="Send keys as partition key (key), ordering key, or not at all.")
    ] = "key",
    seed: Annotated[int, typer.Option(help="Seed of the choice of keys.")] = 0,
    *,
    connection: Connection,
) -> None:
    """Publish messages whose values carry their key and its sequence number.

    Each value starts with 'key:seq:', where seq counts the messages of the key from 0, so a reader
    can tell lost, repeated and reordered messages.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

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
    errors = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        Remaining(),
        console=errors,
        disable=not errors.is_terminal,
    ) as bars:
        task = bars.add_task(f"Publishing to {topic}", total=messages)
        report = run(
            workload, connection, topic, progress=lambda count: bars.update(task, advance=count)
        )
    typer.echo(
        f"Published {report.sent:,} messages with {len(report.per_key):,} keys to {topic} in "
        f"{report.seconds:.1f} s: {report.rate_per_s:,.0f} messages/s."
    )
