"""``keyshard unpark`` and ``discard``: what becomes of dead letters."""

# ruff: noqa: PLC0415 - what a command needs is imported when it runs, so that --help is fast.
from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keyshard.cli.connecting import ClientConfOption, source_of
from keyshard.cli.output import (
    ASK_TIMEOUT_S,
    JsonOption,
    PidOption,
    ServiceUrlOption,
    SubscriptionOption,
    plural,
)
from keyshard.errors import ConfigError
from keyshard.redaction import shown

if TYPE_CHECKING:
    from keyshard.observe.control import RunningSource

_DIGITS_MAX = 9
"""Most digits of an age."""

KeyArgument = Annotated[str | None, typer.Argument(help="Key that is parked.")]
AllOption = Annotated[bool, typer.Option("--all", help="Every key.")]
TopicOption = Annotated[
    str | None, typer.Option("--topic", help="Keys with dead letters of messages of this topic.")
]
OlderOption = Annotated[
    str | None, typer.Option("--older-than", help="Keys parked for longer: 90s, 15m, 6h or 2d.")
]


def unpark(  # noqa: PLR0917 - one argument per option
    key: KeyArgument = None,
    every: AllOption = False,
    topic: TopicOption = None,
    older_than: OlderOption = None,
    subscription: SubscriptionOption = None,
    service_url: ServiceUrlOption = None,
    client_conf: ClientConfOption = None,
    pid: PidOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a running source replay the dead letters of parked keys, and then newer messages."""

    fields = _selection(key, every, topic, older_than)
    source = source_of(subscription, service_url, client_conf, pid)
    told = source.ask("unpark", timeout_s=ASK_TIMEOUT_S, **fields)
    with source.read():
        if as_json:
            typer.echo(json.dumps(told))
        elif key is None:
            typer.echo(f"{plural(told['keys'], 'key')} on the way out, dead letters in order.")
        elif told["parked"]:
            typer.echo(f"Key {key!r} is on its way out: its dead letters are replayed in order.")
        else:
            typer.echo(f"Key {key!r} is not parked.")


def discard(  # noqa: PLR0917 - one argument per option
    key: KeyArgument = None,
    every: AllOption = False,
    topic: TopicOption = None,
    older_than: OlderOption = None,
    rejected: Annotated[
        bool,
        typer.Option(
            "--rejected",
            help="Rejected dead letters, not those of parked keys; alone: every rejected one.",
        ),
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask before several keys are given up.")
    ] = False,
    subscription: SubscriptionOption = None,
    service_url: ServiceUrlOption = None,
    client_conf: ClientConfOption = None,
    pid: PidOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a running source give dead letters up for good; asks before, unless one key is named."""

    fields = _selection(key, every, topic, older_than, rejected=rejected)
    source = source_of(subscription, service_url, client_conf, pid)
    if key is None and not yes:
        _ask(source, fields)
    told = source.ask("discard", timeout_s=ASK_TIMEOUT_S, **fields)
    with source.read():
        typer.echo(
            json.dumps(told)
            if as_json
            else f"{plural(told['letters'], 'dead letter')} given up for good."
        )


def _ask(source: RunningSource, fields: dict[str, Any]) -> None:
    """Ask the person before dead letters of several keys are given up; none of them need no asking.

    Raises:
        ConfigError: There is no terminal to ask at.
    """
    told = source.ask("count_letters", timeout_s=ASK_TIMEOUT_S, **fields)
    with source.read():
        count = int(told["letters"])
        what = f"{plural(count, 'dead letter')} of {source.subscription!r}"
    if not count:
        return
    if not sys.stdin.isatty():
        raise ConfigError(
            f"discard gives {what} up for good, and there is no terminal to ask at. Nothing is "
            "given up. Add --yes."
        )
    typer.confirm(f"Give {what} up for good?", abort=True, err=True)


def _selection(
    key: str | None,
    every: bool,
    topic: str | None,
    older_than: str | None,
    *,
    rejected: bool = False,
) -> dict[str, Any]:
    """Fields of a request that are given; which of them go together the source knows."""
    from keyshard.core.dead_letter.selection import Selection

    age = None if older_than is None else _seconds(older_than)
    every = Selection.for_discard(key, every, topic, age, rejected=rejected).all
    given = {
        "key": key, "all": every or None, "topic": topic, "older_than_s": age,
        "rejected": rejected or None,
    }  # fmt: skip
    return {name: value for name, value in given.items() if value is not None}


def _seconds(text: str) -> float:
    unit = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}.get(text[-1:])
    number = text[:-1]
    if unit is None or not (number.isascii() and number.isdecimal() and len(number) <= _DIGITS_MAX):
        raise ConfigError(
            f"--older-than is {shown(text)}; write a number of at most {_DIGITS_MAX} digits and s, "
            "m, h or d, as in 15m."
        )
    return float(int(number) * unit)
