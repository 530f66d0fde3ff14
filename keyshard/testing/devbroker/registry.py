"""Registry of detached brokers: a small file for each data directory, in the user's cache."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from keyshard.errors import DevBrokerError
from keyshard.redaction import shown
from keyshard.testing.devbroker.cache import cache_dir
from keyshard.testing.devbroker.process import kill_group, start_ticks

_STOP_TIMEOUT_S = 20.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class BrokerRecord:
    """A broker that was started and may still run."""

    pid: int
    started: str
    """Start time of the process, as the system writes it: process ids are reused."""
    version: str
    port: int
    admin_port: int
    data_dir: str
    tls: bool = False
    tokens: bool = False


def data_dir(named: Path | None) -> Path:
    """Return the data directory that a user named, or the default one.

    Raises:
        DevBrokerError: No directory can have this name.
    """
    folder = named if named is not None else cache_dir() / "broker"
    try:
        found = folder.expanduser().resolve()
        os.fsencode(found).decode()
    except (OSError, RuntimeError, ValueError) as exc:
        raise DevBrokerError(
            f"The data directory {shown(str(folder))} cannot be used: {exc}.", "Use another one."
        ) from exc
    return found


def remember(
    pid: int, version: str, port: int, admin_port: int, folder: Path, *,
    tls: bool = False, tokens: bool = False,
) -> BrokerRecord:  # fmt: skip
    """Register a running broker.

    Raises:
        DevBrokerError: It ended meanwhile, or the file cannot be written.
    """
    started = start_ticks(pid)
    if started is None:
        raise DevBrokerError(
            "The broker ended immediately.", f"See its log {folder / 'broker.log'}."
        )
    record = BrokerRecord(pid, started, version, port, admin_port, str(folder), tls, tokens)
    path = _path(folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(asdict(record)) + "\n")
        fresh.replace(path)
    except OSError as exc:
        kill_group(pid)
        raise DevBrokerError(
            f"{path} cannot be written: {exc}.", "Set KEYSHARD_CACHE to a writable directory."
        ) from exc
    return record


def find(folder: Path) -> BrokerRecord | None:
    """Return the broker that runs on a data directory; remove the record of a dead one."""
    return _read(_path(folder))


def running() -> list[BrokerRecord]:
    """Return every running broker, by data directory."""
    found = map(_read, _folder().glob("*.json"))
    return sorted(filter(None, found), key=lambda record: record.data_dir)


def _read(path: Path) -> BrokerRecord | None:
    try:
        record = BrokerRecord(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError):
        record = None
    if record is None or start_ticks(record.pid) != record.started:
        path.unlink(missing_ok=True)
        return None
    return record


def forget(folder: Path) -> None:
    """Remove the record of the broker of a data directory."""
    _path(folder).unlink(missing_ok=True)


def stop(record: BrokerRecord) -> None:
    """Stop a broker gracefully (SIGTERM), or by SIGKILL if it takes too long.

    Raises:
        DevBrokerError: It belongs to another user, or does not end.
    """
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    try:
        os.kill(record.pid, signal.SIGTERM)
    except ProcessLookupError:
        pass
    except PermissionError as exc:
        raise DevBrokerError(
            f"Process {record.pid} belongs to another user.", "Stop the broker as that user."
        ) from exc
    while start_ticks(record.pid) == record.started and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    if start_ticks(record.pid) == record.started:
        kill_group(record.pid)
    forget(Path(record.data_dir))


def _folder() -> Path:
    return cache_dir() / "brokers"


def _path(folder: Path) -> Path:
    return _folder() / f"{sha256(str(folder).encode()).hexdigest()[:16]}.json"
