"""Where the workers of a Spark application are: a file that its driver's processes find.

The user's Python process starts workers, and the stream process of a query asks them. Both belong
to one JVM on the driver's machine: the file is named by its process id, in a directory that nobody
else may enter. It holds the token, so it never leaves that machine.
"""

from __future__ import annotations

import json
import os
import stat
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
    new.write_text(json.dumps(asdict(hosted)))
    new.replace(path)


def read(jvm: int) -> Hosted | None:
    """What is hosted for the application of a JVM; ``None``: nobody started any."""
    try:
        return Hosted(**json.loads(path_of(jvm).read_text()))
    except FileNotFoundError:
        return None


def forget(jvm: int) -> None:
    """Nothing is hosted any more."""
    path_of(jvm).unlink(missing_ok=True)
