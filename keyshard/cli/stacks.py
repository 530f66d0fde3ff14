"""``keyshard stacks``: what the running handlers of a source execute."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import typer

from keyshard.cli.connecting import ClientConfOption, source_of
from keyshard.cli.output import (
    JsonOption,
    PidOption,
    ServiceUrlOption,
    SubscriptionOption,
    age,
    plain,
)
from keyshard.errors import ConfigError

if TYPE_CHECKING:
    from keyshard.control import RunningSource
    from keyshard.core.lanes.lane_status import RunStatus

RUNS_MAX = 200
"""Most messages that a source lists."""
KEY_CHARS = 60
"""Most characters of a key in the text."""


class RunningStack(TypedDict):
    """A message in a handler, and what the handler executes."""

    run: RunStatus
    stack: list[str]
    problem: str | None
    """The reason why there is no stack."""


def stacks(  # noqa: PLR0917 - one argument per option
    limit: Annotated[
        int, typer.Option("--limit", min=1, max=RUNS_MAX, help="Most handlers, longest first.")
    ] = 10,
    subscription: SubscriptionOption = None,
    service_url: ServiceUrlOption = None,
    client_conf: ClientConfOption = None,
    pid: PidOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the Python stacks of running handlers, longest first. Changes nothing."""
    source = source_of(subscription, service_url, client_conf, pid)
    answer = source.ask("runs")
    with source.read():
        running: list[RunStatus] = [one for one in answer["runs"] if one["state"] == "running"]
    found = [_stack_of(source, one) for one in running[:limit]]
    if as_json:
        typer.echo(json.dumps({"stacks": found, "running": len(running)}))
        return
    with source.read():
        for one in found:
            typer.echo(_text(one))
    rest = len(running) - len(found)
    if rest:
        typer.echo(f"{rest:,} more of {source.name!r} run; --limit shows more.")
    elif not running:
        typer.echo(f"No handler of {source.name!r} runs.")


def _stack_of(source: RunningSource, run: RunStatus) -> RunningStack:
    with source.read():
        named: dict[str, Any] = {
            "topic": run["topic"],
            "partition": run["partition"],
            "id": run["messageId"],
        }
    try:
        answer = source.ask("stack", **named)
    except ConfigError as exc:  # It has returned, or its stack cannot be seen.
        return {"run": run, "stack": [], "problem": exc.message}
    with source.read():
        return {"run": run, "stack": [str(one) for one in answer["stack"]], "problem": None}


def _text(one: RunningStack) -> str:
    run = one["run"]
    key = "no key" if run["key"] is None else f"key {plain(repr(run['key']), KEY_CHARS)}"
    seconds = run["runningSeconds"] or 0.0
    attempt = run["attempts"] + 1
    head = (
        f"{key}, message {plain(run['messageId'])} of {plain(run['topic'])}, partition "
        f"{run['partition']}, attempt {attempt}, for {age(seconds)}:"
    )
    note = []
    if run.get("note"):  # Older sources send none.
        note = [f"note, {age(run['noteSecondsAgo'] or 0.0)} ago: {plain(run['note'] or '')}"]
    problem = [] if one["problem"] is None else [f"({plain(one['problem'])})"]
    lines = ["".join(char if char.isprintable() else "?" for char in line) for line in one["stack"]]
    return "\n  ".join([head, *note, *lines, *problem])
