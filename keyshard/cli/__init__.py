"""The command line: ``keyshard``.

No heavy module is imported here; each command imports its modules when it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from io import TextIOWrapper
from typing import Annotated, Any

import typer

from keyshard.cli.broker import broker_app
from keyshard.cli.check import check
from keyshard.cli.config import config_app
from keyshard.cli.dead_letters import dead_letters_app
from keyshard.cli.doctor import doctor
from keyshard.cli.explain import error, explain
from keyshard.cli.pause import pause, resume
from keyshard.cli.produce import produce
from keyshard.cli.rescale import rescale
from keyshard.cli.stacks import stacks
from keyshard.cli.status import ps, status
from keyshard.cli.ui import ui
from keyshard.errors import ConfigError, KeyShardError

_BAD_INPUT, _FAILED, _INTERRUPTED = 2, 1, 130


class _App(typer.Typer):
    """A command line whose errors are a few lines on stderr, without a traceback."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TextIOWrapper):
                # A key may hold lone surrogates, or characters that the terminal does not have.
                stream.reconfigure(errors="backslashreplace")
        try:
            return super().__call__(*args, **kwargs)
        except KeyShardError as exc:
            sys.stderr.write(f"{exc}\n")
            sys.exit(_BAD_INPUT if isinstance(exc, ConfigError) else _FAILED)
        except KeyboardInterrupt:
            sys.stderr.write("Interrupted.\n")
            sys.exit(_INTERRUPTED)


app = _App(
    name="keyshard",
    help="Operate keyshard, which consumes Apache Pulsar with more parallelism than partitions.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(broker_app, name="broker")
app.command("produce")(produce)
app.command("check")(check)
app.command("ps")(ps)
app.command("status")(status)
app.command("explain")(explain)
app.command("error")(error)
app.command("stacks")(stacks)
app.add_typer(dead_letters_app, name="dead-letters")
app.command("rescale")(rescale)
app.command("pause")(pause)
app.command("resume")(resume)
app.command("doctor")(doctor)
app.command("ui")(ui)
app.add_typer(config_app, name="config")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        arguments: Arguments after the program's name; default: those of this process.
    """
    app(arguments)


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            number = version("keyshard")
        except PackageNotFoundError:
            number = "unknown (not installed)"
        typer.echo(f"keyshard {number}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass
