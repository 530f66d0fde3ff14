"""An archive of the classes that a broker loads, which its JVM maps instead of reading 300 jars.

A start takes 4.5 s of processor time with it and 7.5 s without. The JVM takes an archive only of
classes from jars: the folder with the configuration must not be on the class path.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from keyshard.errors import DevBrokerError
from keyshard.testing.devbroker.cache import file_lock
from keyshard.testing.devbroker.progress import Announcer

_LOCK_TIMEOUT_S = 300.0


def log_configuration(home: Path) -> dict[str, str]:
    """Environment with which the configuration of the log is found without the class path."""
    home = home.resolve()  # as the broker's script has it: an archive is of one class path
    return {
        # Its folder comes on the class path; there is none of that name.
        "PULSAR_LOG_CONF": str(home / "no-classes" / "log4j2.yaml"),
        "PULSAR_EXTRA_OPTS": f"-Dlog4j.configurationFile={home / 'conf' / 'log4j2.yaml'}",
    }


def class_archive(home: Path, java: Path, record: Callable[[Path], None]) -> Path | None:
    """The archive of a distribution for one Java; it is made when it is not there yet.

    Args:
        home: Folder of the distribution.
        java: Folder of the Java.
        record: Runs a broker once, whose JVM writes its archive into a file at its end.

    Returns:
        ``None`` where none can be had.
    """
    release = java / "release"
    of = f"{java.resolve()}\n{release.read_text(errors='replace') if release.is_file() else ''}"
    name = f"classes-{home.name}-{sha256(of.encode()).hexdigest()[:12]}.jsa"
    archive = home.parent / name
    if not archive.exists():
        try:
            with file_lock(home.parent / f".lock-{name}", _LOCK_TIMEOUT_S):
                if not archive.exists():
                    _make(archive, record)
        except (OSError, DevBrokerError):
            return None
    return archive if archive.stat().st_size else None


def _make(archive: Path, record: Callable[[Path], None]) -> None:
    Announcer().say("Preparing the broker's classes for quicker starts: once, about 20 seconds.")
    part = archive.with_suffix(".part")
    part.unlink(missing_ok=True)
    record(part)
    if part.exists():
        part.replace(archive)
    else:
        archive.touch()  # this Java makes none, and is not asked again
