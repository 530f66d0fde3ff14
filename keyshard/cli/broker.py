"""``keyshard broker``: a real Pulsar broker on this machine, for development."""

# ruff: noqa: PLC0415 - each command imports its modules when it runs, so that --help is fast.
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

from keyshard.core.releases import DEFAULT_VERSION

if TYPE_CHECKING:
    from keyshard.testing.devbroker.registry import BrokerRecord

_POLL_S = 0.2
_PORT = 6650
_ADMIN_PORT = 8080
_CLIENT_CONF = "client.conf"
"""File in the data directory with the connection of a broker with TLS or tokens."""

broker_app = typer.Typer(
    help="Run a Pulsar broker for development, which only this machine can reach.",
    no_args_is_help=True,
)

_DATA = "Data directory of the broker. Default: "
DataOption = Annotated[
    Path | None, typer.Option("--data", help=f"{_DATA}a directory in the user's cache.")
]
AnyDataOption = Annotated[
    Path | None, typer.Option("--data", help=f"{_DATA}that of every running broker of the user.")
]
LogDataOption = Annotated[
    Path | None,
    typer.Option(
        "--data",
        help=f"{_DATA}that of the only running broker, or else a directory in the user's cache.",
    ),
]


@broker_app.command()
def start(  # noqa: PLR0917 - one argument per option
    version: Annotated[
        str | None,
        typer.Option(
            help=f"Pulsar version, downloaded on first use. Default: {DEFAULT_VERSION}.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[int, typer.Option(help="Port of the broker.")] = _PORT,
    admin_port: Annotated[int, typer.Option(help="Port of the admin interface.")] = _ADMIN_PORT,
    data: DataOption = None,
    tls: Annotated[
        bool, typer.Option("--tls", help="Enable TLS on both ports, with an authority of its own.")
    ] = False,
    tokens: Annotated[
        bool,
        typer.Option(
            "--tokens",
            help="Require a token from every client. The client.conf in the data directory "
            "contains the token of role admin.",
        ),
    ] = False,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Run until Ctrl-C, then stop the broker.")
    ] = False,
) -> None:
    """Start a broker, and return when it is ready."""
    from rich.console import Console

    from keyshard.errors import DevBrokerError
    from keyshard.testing.devbroker import DevBroker, install, registry
    from keyshard.testing.devbroker.security import write_client_conf

    folder = registry.data_dir(data)
    running = registry.find(folder)
    if running is not None:
        if foreground:
            raise DevBrokerError(f"A broker already runs on {folder}.", "Stop it first.")
        if version not in {None, running.version}:
            raise DevBrokerError(f"Pulsar {running.version} runs on {folder}.", "Stop it first.")
        typer.echo(f"Already running. {_describe(running)}")
        return
    version = version or DEFAULT_VERSION
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
                raise DevBrokerError(
                    "The broker ended by itself.", f"See its log {broker.log_path}."
                )
        finally:
            broker.stop()
            registry.forget(folder)


@broker_app.command()
def stop(data: DataOption = None) -> None:
    """Stop a broker, and keep its data."""
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
                f"No broker runs on {registry.data_dir(None)}, but brokers run on other data "
                "directories.",
                f"To stop one of them, name its directory: {ways}.",
            )
        typer.echo(f"No broker runs on {registry.data_dir(data)}.")
        return
    registry.stop(found)
    typer.echo(f"Stopped the broker on {found.data_dir}.")


@broker_app.command()
def status(data: AnyDataOption = None) -> None:
    """List the running brokers; exit status 1 if none runs."""
    found = _running(data)
    for record in found:
        typer.echo(f"Running. {_describe(record)}")
    if not found:
        typer.echo(_none(data))
        raise typer.Exit(1)


@broker_app.command()
def logs(
    lines: Annotated[
        int, typer.Option("-n", "--lines", min=0, max=1_000_000, help="Number of lines to print.")
    ] = 50,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines until Ctrl-C.")
    ] = False,
    data: LogDataOption = None,
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
        raise DevBrokerError(
            f"The log {path} does not exist, because no broker was started there.",
            "Start one, or correct --data.",
        ) from None
    except OSError as exc:
        raise DevBrokerError(
            f"The log {path} cannot be read: {exc.strerror}.", "Check its permissions."
        ) from None
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
    """Return the broker of a data directory; without one, all brokers that this user started."""
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
        lines.append(f"  connect  --client-conf {Path(record.data_dir) / _CLIENT_CONF}")
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
