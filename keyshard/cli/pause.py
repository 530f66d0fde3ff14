"""``keyshard pause`` and ``keyshard resume``: whether a running source receives."""

from __future__ import annotations

import json

import typer

from keyshard.cli.connecting import ClientConfOption, source_of
from keyshard.cli.output import JsonOption, PidOption, ServiceUrlOption, SubscriptionOption


def pause(
    subscription: SubscriptionOption = None,
    service_url: ServiceUrlOption = None,
    client_conf: ClientConfOption = None,
    pid: PidOption = None,
    as_json: JsonOption = False,
) -> None:
    """Stop a running source from receiving, until it is resumed or restarted."""
    source = source_of(subscription, service_url, client_conf, pid)
    answer = source.ask("pause")
    text = "is paused; its consumers stay connected. To go on: keyshard resume"
    typer.echo(json.dumps(answer) if as_json else f"{source.name!r} (pid {source.pid}) {text}")


def resume(
    subscription: SubscriptionOption = None,
    service_url: ServiceUrlOption = None,
    client_conf: ClientConfOption = None,
    pid: PidOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a paused source receive again."""
    source = source_of(subscription, service_url, client_conf, pid)
    answer = source.ask("resume")
    text = "receives again."
    typer.echo(json.dumps(answer) if as_json else f"{source.name!r} (pid {source.pid}) {text}")
