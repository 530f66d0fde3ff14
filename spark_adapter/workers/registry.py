"""The registry of an application's workers: a file that the driver's processes find.

The user's Python process starts workers, and the stream process of a query asks for them. Both
belong to one JVM on the driver's machine, whose process id names the file. The file also holds the
start time of the JVM. So another JVM that gets the id does not use the workers of a killed
application. The file holds the token. Its directory belongs to one user, and it never leaves the
machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from keyshard.control_folder import is_own_folder
from keyshard.errors import ConfigError


@dataclass(frozen=True)
class RegisteredLaunchers:
    """The launchers of :func:`spark_adapter.start_workers`."""

    token: str = field(repr=False)
    """Token that requests must prove to know."""
    launchers: list[str]
    """Endpoints of the launchers: ``grpc://host:port``."""


def path_of(jvm: int) -> Path:
    """Return the file of a JVM's application.

    Raises:
        ConfigError: The directory belongs to another user, or others may enter it.
    """
    directory = Path(tempfile.gettempdir()) / f"keyshard-spark-{os.getuid()}"
    with suppress(FileExistsError):
        directory.mkdir(0o700)
    if not is_own_folder(directory):
        raise ConfigError(
            f"{directory} is not a private directory of this user, but the token of workers must "
            "be stored there.",
            "Remove it, or set TMPDIR to another directory, for the driver's Python and for its "
            "JVM.",
        )
    return directory / f"{jvm}.json"


def write(jvm: int, hosted: RegisteredLaunchers) -> None:
    """Write the file of a JVM's application, atomically."""
    path = path_of(jvm)
    new = path.with_suffix(f".{os.getpid()}")
    new.touch(0o600)
    new.write_text(json.dumps({"started": _started(jvm), **asdict(hosted)}))
    new.replace(path)


def read(jvm: int) -> RegisteredLaunchers | None:
    """Read the file of a JVM's application; ``None`` if it hosts no workers.

    A file that is unreadable, or belongs to an earlier process with that id, is removed.
    """
    path = path_of(jvm)
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        match json.loads(text):
            case {"started": str(started), "token": str(token), "launchers": list(launchers)}:
                if started and started == _started(jvm):
                    return RegisteredLaunchers(token, launchers)
    except (ValueError, RecursionError):
        pass
    path.unlink(missing_ok=True)
    return None


def _started(process: int) -> str:
    """Return a process's start as the system states it; empty if there is no such process.

    Two processes with the same id have different starts.
    """
    try:
        # The name, in parentheses, may contain anything; the start is the 20th field after it.
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {fields[19]}"
    except (OSError, IndexError):
        listed = subprocess.run(
            ["ps", "-o", "lstart=", "-p", str(process)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return listed.stdout.strip()


def forget(jvm: int) -> None:
    """Remove the file of a JVM's application."""
    path_of(jvm).unlink(missing_ok=True)
