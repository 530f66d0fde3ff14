"""Where the workers of a Spark application are: a file that its driver's processes find.

The user's Python process starts workers, and the stream process of a query asks them. Both belong
to one JVM on the driver's machine: the file is named by its process id and says when that process
started, so another JVM that gets the id does not take the workers of a killed application for its
own. The file is in a directory that nobody else may enter. It holds the token, so it never leaves
that machine.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from keyshard.errors import ConfigError


@dataclass(frozen=True)
class Hosted:
    """What :func:`spark_adapter.start_workers` hosts now."""

    token: str = field(repr=False)
    """Who asks without it is refused."""
    doors: list[str]
    """Where workers are asked for: ``grpc://host:port``."""


def path_of(jvm: int) -> Path:
    """The file of the application of a JVM.

    Raises:
        ConfigError: Somebody else has its directory.
    """
    directory = Path(tempfile.gettempdir()) / f"keyshard-spark-{os.getuid()}"
    with suppress(FileExistsError):
        directory.mkdir(0o700)
    found = directory.lstat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"{directory} belongs to somebody else, or others may enter it; it is to hold the "
            "token of workers. Remove it, or let TMPDIR name another directory, for the driver's "
            "Python and its JVM alike."
        )
    return directory / f"{jvm}.json"


def write(jvm: int, hosted: Hosted) -> None:
    """Tell the application of a JVM what is hosted; at once, or not at all."""
    path = path_of(jvm)
    new = path.with_suffix(f".{os.getpid()}")
    new.touch(0o600)
    new.write_text(json.dumps({"started": _started(jvm), **asdict(hosted)}))
    new.replace(path)


def read(jvm: int) -> Hosted | None:
    """The workers of the application of a JVM; ``None`` if it has none.

    A file that cannot be read, or is of another process with that id, is removed.
    """
    path = path_of(jvm)
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        match json.loads(text):
            case {"started": str(started), "token": str(token), "doors": list(doors)}:
                if started and started == _started(jvm):
                    return Hosted(token, doors)
    except (ValueError, RecursionError):
        pass
    path.unlink(missing_ok=True)
    return None


def _started(process: int) -> str:
    """When a process started, as the system says it; empty for none.

    No two processes of one id have the same.
    """
    try:
        # The name, in brackets, may hold anything; the start is the 20th field behind it.
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {fields[19]}"
    except (OSError, IndexError):
        told = subprocess.run(
            ["ps", "-o", "lstart=", "-p", str(process)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return told.stdout.strip()


def forget(jvm: int) -> None:
    """Nothing is hosted any more."""
    path_of(jvm).unlink(missing_ok=True)
