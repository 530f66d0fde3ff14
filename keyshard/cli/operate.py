"""``keyshard unpark`` and ``discard``: what becomes of dead letters."""

# ruff: noqa: PLC0415 - what a command needs is imported when it runs, so that --help is fast.
from __future__ import annotations

import json
from typing import Annotated, Any

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
        bool, typer.Option("--rejected", help="Rejected dead letters, not those of parked keys.")
    ] = False,
    subscription: SubscriptionOption = None,
    service_url: ServiceUrlOption = None,
    client_conf: ClientConfOption = None,
    pid: PidOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a running source give dead letters up for good."""

    fields = _selection(key, every, topic, older_than)
    if rejected:
        fields["rejected"] = True
    source = source_of(subscription, service_url, client_conf, pid)
    told = source.ask("discard", timeout_s=ASK_TIMEOUT_S, **fields)
    typer.echo(
        json.dumps(told)
        if as_json
        else f"{plural(told['letters'], 'dead letter')} given up for good."
    )


def _selection(
    key: str | None, every: bool, topic: str | None, older_than: str | None
) -> dict[str, Any]:
    """Fields of a request that are given; which of them go together the source knows."""
    from keyshard.core.dead_letter.selection import Selection

    age = None if older_than is None else _seconds(older_than)
    Selection(key, every, topic, age)
    given = {"key": key, "all": every or None, "topic": topic, "older_than_s": age}
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
