"""The environment of a Java process of Pulsar's distribution."""

from __future__ import annotations

import os
from pathlib import Path

from keyshard.testing.devbroker.classes import log_configuration

# Only the first compiler runs: a start takes half the processor time (6.7 s against 14.4 s). Each
# message costs twice as much afterwards.
_SPEED = "-XX:+UseParallelGC -XX:+PerfDisableSharedMem"
_QUICK = "-XX:TieredStopAtLevel=1"


def jvm_environment(
    home: Path, java: Path, logs: Path, *, memory: str, options: str, optimised: bool = False
) -> dict[str, str]:
    """The whole environment of ``bin/pulsar``, without what the caller's has for other Pulsars.

    Args:
        home: Folder of the distribution.
        java: Folder of the Java.
        logs: Folder for log files; the log itself goes to standard output.
        memory: Options that limit the memory of the JVM.
        options: Further options of the JVM.
        optimised: Whether the JVM compiles as one that runs long.
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
