"""``keyshard broker``: a real Pulsar broker on this machine, for development."""

# ruff: noqa: PLC0415 - what a command needs is imported when it runs, so that --help is fast.
from __future__ import annotations

import shlex
import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from keyshard.testing.devbroker.registry import BrokerRecord

_POLL_S = 0.2
_VERSION = "4.0.8"  # As keyshard.testing.devbroker says, which would load httpx for --help.
_PORT = 6650
_ADMIN_PORT = 8080
_CLIENT_CONF = "client.conf"
"""Says in the data directory how a broker with TLS or tokens is reached."""

broker_app = typer.Typer(
    help="Start and stop a real Pulsar broker on this machine, reachable from this machine only.",
    no_args_is_help=True,
)

DataOption = Annotated[
    Path | None,
    typer.Option(
        "--data",
        help="The broker's data directory; default: one in the cache, or of the one that runs.",
    ),
]


@broker_app.command()
def start(  # noqa: PLR0917 - one argument per option
    version: Annotated[str, typer.Option(help="Pulsar version; fetched once.")] = _VERSION,
    port: Annotated[int, typer.Option(help="Port for clients.")] = _PORT,
    admin_port: Annotated[int, typer.Option(help="Port of the admin interface.")] = _ADMIN_PORT,
    data: DataOption = None,
    tls: Annotated[
        bool, typer.Option("--tls", help="TLS on both ports, by an authority of its own.")
    ] = False,
    tokens: Annotated[
        bool,
        typer.Option(
            "--tokens", help="Ask everybody for a token; the client.conf has that of role admin."
        ),
    ] = False,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay until Ctrl-C, then stop the broker.")
    ] = False,
) -> None:
    """Start a broker and return when it is ready; with --tls or --tokens, name a client.conf."""
    from rich.console import Console

    from keyshard.errors import DevBrokerError
    from keyshard.testing.devbroker import DevBroker, install, registry
    from keyshard.testing.devbroker.security import write_client_conf

    folder = registry.data_dir(data)
    running = registry.find(folder)
    if running is not None:
        if foreground:
            raise DevBrokerError(f"A broker runs on {folder} already. Stop it first.")
        typer.echo(f"Already running. {_describe(running)}")
        return
    broker = DevBroker(
        version, port, admin_port, folder, detached=not foreground, tls=tls, tokens=tokens
    )
    install(version)
    if tls or tokens:
        write_client_conf(folder / _CLIENT_CONF, broker.connection)
    with Console(stderr=True).status("Starting the broker"):
        broker.start()
    assert broker.pid is not None
    record = registry.remember(
        broker.pid, version, port, admin_port, folder, tls=tls, tokens=tokens
    )
    typer.echo(f"Started. {_describe(record)}")
    if foreground:
        try:
            _wait_until_interrupted(broker.is_running)
            if not broker.is_running():
                raise DevBrokerError(f"The broker ended by itself. Its log is {broker.log_path}.")
        finally:
            broker.stop()
            registry.forget(folder)


@broker_app.command()
def stop(data: DataOption = None) -> None:
    """Stop the broker on --data, or on the directory that start has by default; data stays."""
    from keyshard.errors import DevBrokerError
    from keyshard.testing.devbroker import registry

    found = registry.find(registry.data_dir(data))
    if found is None:
        others = [] if data is not None else registry.running()
        if others:
            ways = "; ".join(
                f"pid {one.pid} at port {one.port}: keyshard broker stop --data "
                f"{shlex.quote(one.data_dir)}"
                for one in others
            )
            raise DevBrokerError(
                f"No broker runs on {registry.data_dir(None)}. Brokers on other data directories "
                f"are not stopped unless --data names them: {ways}."
            )
        typer.echo(f"No broker runs on {registry.data_dir(data)}.")
        return
    registry.stop(found)
    typer.echo(f"Stopped the broker on {found.data_dir}.")


@broker_app.command()
def status(data: DataOption = None) -> None:
    """Say which brokers run, and where; exit status 1 when none does."""
    found = _running(data)
    for record in found:
        typer.echo(f"Running. {_describe(record)}")
    if not found:
        typer.echo(_none(data))
        raise typer.Exit(1)


@broker_app.command()
def logs(
    lines: Annotated[
        int, typer.Option("-n", "--lines", min=0, max=1_000_000, help="Last lines to print.")
    ] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    data: DataOption = None,
) -> None:
    """Print the end of the broker's log."""
    from keyshard.errors import DevBrokerError
    from keyshard.testing.devbroker import registry

    found = _running(data)
    folder = Path(found[0].data_dir) if len(found) == 1 else registry.data_dir(data)
    path = folder / "broker.log"
    try:
        opened = path.open(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        raise DevBrokerError(f"There is no log at {path}: no broker was started there.") from None
    except OSError as exc:
        raise DevBrokerError(f"The log {path} cannot be read: {exc.strerror}.") from None
    with opened as log:
        for line in deque(log, maxlen=lines):
            typer.echo(line, nl=False)
        while follow:
            line = log.readline()
            if line:
                typer.echo(line, nl=False)
            else:
                time.sleep(_POLL_S)


def _running(data: Path | None) -> list[BrokerRecord]:
    """The broker on the folder that is named, else every one that was started by this user."""
    from keyshard.testing.devbroker import registry

    if data is None:
        return registry.running()
    record = registry.find(registry.data_dir(data))
    return [] if record is None else [record]


def _none(data: Path | None) -> str:
    from keyshard.testing.devbroker import registry

    return "No broker runs." if data is None else f"No broker runs on {registry.data_dir(data)}."


def _describe(record: BrokerRecord) -> str:
    binary, web = ("pulsar+ssl", "https") if record.tls else ("pulsar", "http")
    lines = [
        f"Pulsar {record.version}, pid {record.pid}",
        f"  clients  {binary}://127.0.0.1:{record.port}",
        f"  admin    {web}://127.0.0.1:{record.admin_port}",
        f"  data     {record.data_dir}",
    ]
    if record.tls or record.tokens:
        lines.append(f"  reach it --client-conf {Path(record.data_dir) / _CLIENT_CONF}")
    return "\n".join(lines)


def _wait_until_interrupted(alive: Callable[[], bool]) -> None:
    asked = False

    def ask(_signal: int, _frame: FrameType | None) -> None:
        nonlocal asked
        asked = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask)
    while not asked and alive():
        time.sleep(_POLL_S)
