"""``keyshard explain`` and ``keyshard error``: a key of a running source, a code of an error."""

# ruff: noqa: PLC0415 - each command imports its modules when it runs, so that --help is fast.
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
    age,
    console,
    plain,
    plural,
)

if TYPE_CHECKING:
    from keyshard.observe.status_types import Explanation, KeyAssignment, ParkedBy, SlotAssignment


def explain(  # noqa: PLR0917 - one argument per option
    key: Annotated[
        str, typer.Argument(help="Routing key of the message: its ordering key, or else its key.")
    ],
    parallelism: Annotated[
        int | None,
        typer.Option(help="Number of equal ranges. With it, no running source is needed."),
    ] = None,
    subscription: SubscriptionOption = None,
    service_url: ServiceUrlOption = None,
    client_conf: ClientConfOption = None,
    pid: PidOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the slot, range and owner of a key, and the state of its messages."""

    if parallelism is not None:
        found = _offline(key, parallelism)
        typer.echo(json.dumps(found, indent=2) if as_json else _where(found))
        return
    source = source_of(subscription, service_url, client_conf, pid)
    explained: Explanation = source.ask("explain", key=key)
    with source.read():
        text = f"{_where(explained)}\n{_what(explained)}"
        typer.echo(json.dumps(explained, indent=2) if as_json else text)


def error(
    code: Annotated[
        str | None,
        typer.Argument(
            help="Code of the error, such as KEYSHARD_TOPIC_NOT_FOUND or topic-not-found.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Explain the code of an error: its cause and its remedy. Without a code, list all codes."""
    from keyshard.core.option_checks import did_you_mean
    from keyshard.error_reference import BY_ERROR, REFERENCES, meaning, section
    from keyshard.errors import BY_CODE, ConfigError

    if code is None:
        from rich.markup import escape
        from rich.table import Table

        table = Table("code", "meaning", box=None, pad_edge=False)
        for one in REFERENCES:
            table.add_row(one.error.code, escape(meaning(one.error)))
        console().print(table)
        return
    name = code.strip("[]").upper().replace("-", "_")
    found = BY_CODE.get(name) or BY_CODE.get(f"KEYSHARD_{name}")
    if found is None:
        hint = did_you_mean(name, BY_CODE, "To list all codes, run: keyshard error.")
        raise ConfigError(f"{code} is not the code of an error.", hint)
    typer.echo(section(BY_ERROR[found]), nl=False)


def _offline(key: str, parallelism: int) -> KeyAssignment:
    from keyshard.core.ring.hash_range import range_index, split_ring
    from keyshard.core.ring.key_slot import broker_text, possible_slots

    key = broker_text(key)
    ring = split_ring(parallelism)
    assigned: list[SlotAssignment] = [
        {"slot": slot, "range": index, "hashRange": str(ring[index])}
        for slot in possible_slots(key)
        for index in [range_index(slot, parallelism)]
    ]
    return {"key": key, **assigned[0], "ifBytes": assigned[1] if len(assigned) > 1 else None}


def _where(found: KeyAssignment) -> str:
    lines = [
        f"key     {found['key']!r}",
        f"slot    {found['slot']}",
        f"range   {found['range']} (slots {found['hashRange']})",
    ]
    as_bytes = found.get("ifBytes")
    if as_bytes is not None:
        lines.append(
            f"        if its producer set it as bytes: slot {as_bytes['slot']}, range "
            f"{as_bytes['range']} (slots {as_bytes['hashRange']})"
        )
    return "\n".join(lines)


def _what(found: Explanation) -> str:
    lane, waiting = found["lane"], found["waiting"]
    state = "none: the source has no handlers" if lane is None else lane["state"]
    if lane is not None and lane["messageId"] is not None:
        state += f", message {lane['messageId']}, attempt {lane['attempts'] + 1}"
    if lane is not None and lane["reason"]:
        state += f": {plain(lane['reason'])}"
    replay = f"keyshard dead-letters replay --key {shlex.quote(found['key'])}"
    parked = f"yes: {replay}" if found["parked"] else "no"
    lines = [
        f"owner   {found['owner']}",
        f"lane    {state}",
        f"waiting {'unknown' if waiting is None else plural(waiting, 'message')}",
        f"parked  {parked}",
        *_why_parked(found.get("parkedBy")),
    ]
    return "\n".join(lines)


def _why_parked(by: ParkedBy | None) -> list[str]:
    from keyshard.core.lanes.failure import times

    if by is None:
        return []
    old = "" if by["forSeconds"] is None else f", the first {age(by['forSeconds'])} old"
    lines = [f"        {plural(by['deadLetters'], 'dead letter')}{old}"]
    message = by["message"]
    if message is None:
        return [*lines, f"        cause unknown: {plain(by['unknown'])}"]
    failed = f" failed {times(message['attempts'])}" if message["attempts"] else ""
    lines.append(
        f"because message {message['messageId']} of {message['topic']}, partition "
        f"{message['partition']},{failed}: {plain(message['error'])}"
    )
    return [*lines, f"content {_content(message['value'], message['valueBytes'])}"]


def _content(value: str | None, length: int | None) -> str:
    if length is None:
        return "too large for a single dead letter"
    if value is None:
        return "none"
    return f"{value!r}{_rest(value, length)}" if value else "empty"


def _rest(value: str, length: int) -> str:
    return f"... ({length:,} bytes)" if length > len(value.encode()) else ""
