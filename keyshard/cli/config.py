"""``keyshard config show``: the settings of programs and commands, and their origins."""

# ruff: noqa: PLC0415 - each command imports its modules when it runs, so that --help is fast.
from __future__ import annotations

import json
from typing import Annotated

import typer

from keyshard.cli.connecting import ClientConfOption, ConfigOption
from keyshard.cli.output import JsonOption, console

config_app = typer.Typer(help="Show the settings, and where they come from.", no_args_is_help=True)


@config_app.command("show")
def show(
    config: ConfigOption = None,
    client_conf: ClientConfOption = None,
    every: Annotated[bool, typer.Option("--all", help="Show defaults, too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show each setting and its origin: environment, TOML file, client.conf or default.

    Secrets are hidden. Variables that begin with KEYSHARD_ and set nothing are named.
    """
    from keyshard.config.settings import DEFAULT, read_settings, variables
    from keyshard.core.option_checks import did_you_mean

    settings = read_settings(config, client_conf=client_conf)
    found = [one for one in settings.all() if every or one.origin != DEFAULT]
    if as_json:
        values = [
            {"table": one.table, "name": one.name, "value": one.text, "origin": one.origin}
            for one in found
        ]
        typer.echo(json.dumps({"settings": values, "unused": settings.unused}, indent=2))
        return
    from rich.markup import escape
    from rich.table import Table

    table = Table("setting", "value", "from", box=None, pad_edge=False)
    for one in found:
        table.add_row(f"{one.table}.{one.name}", escape(one.text), escape(one.origin))
    out = console()
    out.print(table if found else "Nothing is set. --all shows the defaults.")
    for name in settings.unused:
        hint = did_you_mean(name, variables())
        out.print(f"{name} in the environment sets nothing. {hint}".rstrip(), style="yellow")
