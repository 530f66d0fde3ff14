"""``keyshard doctor``: what is wrong with a topic, a subscription or a load."""

# ruff: noqa: PLC0415 - what a command needs is imported when it runs, so that --help is fast.
from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from keyshard.cli.connecting import with_connection
from keyshard.config.connection import Connection
from keyshard.errors import ConfigError

if TYPE_CHECKING:
    from keyshard.core.diagnosis import Finding

_PROBLEM = 1
_STYLES = {"ok": "green", "warning": "yellow", "problem": "red"}


@with_connection
def doctor(  # noqa: PLR0917 - one argument per option
    topic: Annotated[str, typer.Option(help="Topic that is, or will be, consumed.")],
    subscription: Annotated[str, typer.Option(help="Subscription that is, or will be, used.")],
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, max=10**9, help="Messages per second to check the limits against."),
    ] = None,
    message_bytes: Annotated[
        int | None,
        typer.Option(min=1, max=10**9, help="Size of a message; default: as seen on the topic."),
    ] = None,
    parallelism: Annotated[int, typer.Option(help="Number of hash ranges.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    *,
    connection: Connection,
) -> None:
    """Look at the broker, a topic and a subscription, without consuming or changing anything.

    Exit status 0: no problem, warnings at most; 1: a problem was found.
    """
    from keyshard.broker.connect import connect, connect_admin
    from keyshard.config.source import SourceConfig
    from keyshard.core.diagnosis import Level
    from keyshard.observe.doctor import Expected, examine

    config = SourceConfig(
        topic,
        subscription=subscription,
        connection=connection,
        parallelism=parallelism,
    )
    if config.admin_url is None:
        raise ConfigError("doctor needs the admin interface of this broker. Give --admin-url.")
    if rate is None and message_bytes is not None:
        raise ConfigError("--message-bytes says how large the messages of --rate are. Give both.")
    admin = connect_admin(connection)
    try:
        findings = examine(
            config,
            lambda: connect(connection),
            admin,
            None if rate is None else Expected(rate, message_bytes),
        )
    finally:
        admin.close()
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _print(findings)
    if any(finding.level is Level.PROBLEM for finding in findings):
        raise typer.Exit(_PROBLEM)


def _print(findings: list[Finding]) -> None:
    from rich.markup import escape

    from keyshard.cli.output import console

    out = console()
    for finding in findings:
        level = finding.level.value
        out.print(
            f"[{_STYLES[level]}]{level:<8}[/] [bold]{escape(finding.about)}[/]: "
            f"{escape(finding.text)}",
            highlight=False,
        )
        if finding.advice:
            out.print(f"         {escape(finding.advice)}", highlight=False)
