"""``keyshard explain``: where a key lies, and what happens to it."""

# ruff: noqa: PLC0415 - what a command needs is imported when it runs, so that --help is fast.
from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from keyshard.cli.connecting import ClientConfOption, source_of
from keyshard.cli.output import JsonOption, PidOption, ServiceUrlOption, SubscriptionOption

if TYPE_CHECKING:
    from keyshard.observe.status_types import Explanation, Located, Place


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
    typer.echo(json.dumps(told, indent=2) if as_json else f"{_where(told)}\n{_what(told)}")


def _offline(key: str, parallelism: int) -> Located:
    from keyshard.core.ring.hash_range import range_index, split_ring
    from keyshard.core.ring.key_slot import possible_slots

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
        state += f": {lane['reason']}"
    lines = [
        f"owner   {told['owner']}",
        f"lane    {state}",
        f"waiting {told['waiting']} messages",
        f"parked  {'yes: keyshard unpark ' + told['key'] if told['parked'] else 'no'}",
    ]
    return "\n".join(lines)
