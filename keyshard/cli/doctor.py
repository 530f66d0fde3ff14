"""``keyshard doctor``: problems of a topic, a subscription or a load."""

# ruff: noqa: PLC0415 - each command imports its modules when it runs, so that --help is fast.
from __future__ import annotations

import json
from dataclasses import asdict, replace
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
    topic: Annotated[str | None, typer.Option(help="Topic to check, for a source.")] = None,
    subscription: Annotated[
        str | None, typer.Option(help="Subscription to check. It does not have to exist yet.")
    ] = None,
    sink: Annotated[
        str | None,
        typer.Option(help="Topic to check, for a sink: permission and deduplication."),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=10**9,
            help="Expected load, messages per second, to check against the limits.",
        ),
    ] = None,
    message_bytes: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10**9,
            help="Size of a message of this load, bytes. Default: the mean size on the topic.",
        ),
    ] = None,
    parallelism: Annotated[int, typer.Option(help="Number of hash ranges.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    *,
    connection: Connection,
) -> None:
    """Check a broker, and a topic with its subscription or as a sink. Changes nothing.

    Exit status 0: no problem; 1: a problem was found.
    """
    from keyshard.broker.connect import connect, connect_admin
    from keyshard.config.source import SourceConfig
    from keyshard.core.diagnosis import Level
    from keyshard.core.position.entry import full_topic_name
    from keyshard.observe.doctor import Expected, examine, examine_sink

    if connection.admin_url is None:
        raise ConfigError("doctor needs the admin interface of this broker.", "Add --admin-url.")
    if sink is not None and (topic, subscription, rate, message_bytes) != (None,) * 4:
        raise ConfigError("--sink checks only a sink.", "Remove the other options of a check.")
    if sink is None and (topic is None or subscription is None):
        raise ConfigError("No topic is given.", "Add --topic and --subscription, or --sink.")
    if rate is None and message_bytes is not None:
        raise ConfigError(
            "--message-bytes needs --rate, the number of messages per second.", "Add --rate."
        )
    admin = connect_admin(connection)
    try:
        if sink is not None:
            findings = examine_sink(full_topic_name(sink), lambda: connect(connection), admin)
        else:
            config = SourceConfig(
                topic or "", subscription=subscription or "", connection=connection,
                parallelism=parallelism,
            )  # fmt: skip
            checking = replace(connection, transport="auto")  # pulsar-client cannot check entries
            findings = examine(
                config,
                lambda: connect(checking),
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
