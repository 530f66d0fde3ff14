"""``keyshard unpark`` and ``keyshard rescale``: what a running source can be asked to do."""

# ruff: noqa: PLC0415 - what a command needs is imported when it runs, so that --help is fast.
from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from keyshard.cli.output import JsonOption, PidOption, ServiceUrlOption, SubscriptionOption
from keyshard.errors import ConfigError

_TIMEOUT_S = 300.0
"""Longest wait for a running source to do it, seconds."""


def unpark(
    key: Annotated[str, typer.Argument(help="Key that is parked.")],
    subscription: SubscriptionOption = None,
    service_url: ServiceUrlOption = None,
    pid: PidOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a running source replay the dead letters of a key, and then its newer messages."""
    from keyshard.handlers.control import running_source

    source = running_source(subscription, service_url, pid)
    told = source.ask("unpark", key=key, timeout_s=_TIMEOUT_S)
    if as_json:
        typer.echo(json.dumps(told))
    elif told["parked"]:
        typer.echo(f"Key {key!r} is on its way out: its dead letters are replayed in order.")
    else:
        typer.echo(f"Key {key!r} is not parked.")


def rescale(  # noqa: PLR0917 - one argument per option
    ranges: Annotated[int | None, typer.Argument(help="Number of ranges.")] = None,
    balance: Annotated[
        bool, typer.Option("--balance", help="Keep the number; weigh the ranges by their load.")
    ] = False,
    subscription: SubscriptionOption = None,
    service_url: ServiceUrlOption = None,
    pid: PidOption = None,
    as_json: JsonOption = False,
) -> None:
    """Cut the ring of a running source anew, while it runs."""
    from keyshard.handlers.control import running_source

    if (ranges is None) != balance:
        raise ConfigError("Give the number of ranges, or --balance to keep it.")
    source = running_source(subscription, service_url, pid)
    told = source.ask("rescale", ranges=ranges, balance=balance, timeout_s=_TIMEOUT_S)
    typer.echo(json.dumps(told, indent=2) if as_json else _moved(told))


def _moved(told: dict[str, Any]) -> str:
    pauses = [each["pause_ms"] for each in told["pauses"]]
    least = told["optimum_fraction"]
    text = (
        f"{told['ranges_before']} ranges to {told['ranges_after']}: {told['moved_fraction']:.1%} "
        "of the ring moved"
    )
    text += "" if least is None else f", and at least {least:.1%} had to"
    text += f"; epoch {told['epoch']}"
    return f"{text}; longest pause of a range {max(pauses):.0f} ms." if pauses else f"{text}."
