"""``keyshard explain``: where a key lies, and what happens to it."""

# ruff: noqa: PLC0415 - what a command needs is imported when it runs, so that --help is fast.
from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from keyshard.cli.connecting import ClientConfOption, source_of
from keyshard.cli.output import (
    JsonOption,
    PidOption,
    ServiceUrlOption,
    SubscriptionOption,
    plain,
    plural,
)

if TYPE_CHECKING:
    from keyshard.observe.status_types import Explanation, Located, ParkedBy, Place


def explain(  # noqa: PLR0917 - one argument per option
    key: Annotated[str, typer.Argument(help="Routing key: the ordering key, else the key.")],
    parallelism: Annotated[
        int | None,
        typer.Option(help="Number of equal ranges: answer without asking a running source."),
    ] = None,
    subscription: SubscriptionOption = None,
    service_url: ServiceUrlOption = None,
    client_conf: ClientConfOption = None,
    pid: PidOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say the slot, range and owner of a key, and what waits, runs or is parked."""

    if parallelism is not None:
        found = _offline(key, parallelism)
        typer.echo(json.dumps(found, indent=2) if as_json else _where(found))
        return
    source = source_of(subscription, service_url, client_conf, pid)
    told: Explanation = source.ask("explain", key=key)
    with source.read():
        typer.echo(json.dumps(told, indent=2) if as_json else f"{_where(told)}\n{_what(told)}")


def _offline(key: str, parallelism: int) -> Located:
    from keyshard.core.ring.hash_range import range_index, split_ring
    from keyshard.core.ring.key_slot import broker_text, possible_slots

    key = broker_text(key)
    ring = split_ring(parallelism)
    places: list[Place] = [
        {"slot": slot, "range": index, "hashRange": str(ring[index])}
        for slot in possible_slots(key)
        for index in [range_index(slot, parallelism)]
    ]
    return {"key": key, **places[0], "ifBytes": places[1] if len(places) > 1 else None}


def _where(told: Located) -> str:
    lines = [
        f"key     {told['key']!r}",
        f"slot    {told['slot']}",
        f"range   {told['range']} (slots {told['hashRange']})",
    ]
    as_bytes = told.get("ifBytes")
    if as_bytes is not None:
        lines.append(
            f"        if its producer set it as bytes: slot {as_bytes['slot']}, range "
            f"{as_bytes['range']} (slots {as_bytes['hashRange']})"
        )
    return "\n".join(lines)


def _what(told: Explanation) -> str:
    lane = told["lane"]
    state = lane["state"]
    if lane["messageId"] is not None:
        state += f", message {lane['messageId']}, attempt {lane['attempts'] + 1}"
    if lane["reason"]:
        state += f": {plain(lane['reason'])}"
    lines = [
        f"owner   {told['owner']}",
        f"lane    {state}",
        f"waiting {plural(told['waiting'], 'message')}",
        f"parked  {'yes: keyshard unpark ' + shlex.quote(told['key']) if told['parked'] else 'no'}",
        *_why_parked(told.get("parkedBy")),
    ]
    return "\n".join(lines)


def _why_parked(by: ParkedBy | None) -> list[str]:
    from keyshard.core.lanes.failure import times

    if by is None:
        return []
    age = "" if by["forSeconds"] is None else f", the first {_age(by['forSeconds'])} old"
    lines = [f"        {plural(by['letters'], 'dead letter')}{age}"]
    message = by["message"]
    if message is None:
        return [*lines, f"        why is not known: {plain(by['unknown'])}"]
    failed = f" failed {times(message['attempts'])}" if message["attempts"] else ""
    lines.append(
        f"because message {message['messageId']} of {message['topic']}, partition "
        f"{message['partition']},{failed}: {plain(message['error'])}"
    )
    value = message["value"]
    if value is None:
        lines.append("content none")
    elif message["valueBytes"]:
        lines.append(f"content {value!r}{_rest(value, message['valueBytes'])}")
    else:
        lines.append("content empty, or too large for one dead letter")
    return lines


def _rest(value: str, length: int) -> str:
    return f"... ({length:,} bytes)" if length > len(value.encode()) else ""


def _age(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"
