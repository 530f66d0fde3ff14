"""Prints the lock of a Pulsar release: coordinates, size and SHA-256 of each jar that is named.

The coordinates of the jars, one ``group:artifact:version[:classifier]`` a line, come on standard
input. They are those of the folder ``lib`` of the release's distribution. The output belongs in
``keyshard/testing/devbroker/releases/VERSION.lock``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

from keyshard.testing.devbroker.distribution import Artifact, fetch_artifact

_THREADS = 8


@contextmanager
def _silently(_name: str, _size_bytes: int) -> Iterator[Callable[[int], None]]:
    yield lambda _count: None


def line_of(coordinates: str) -> str:
    """Fetch a jar, and return its line."""
    group, name, version, *classifier = coordinates.split(":")
    artifact = Artifact(group, name, version, classifier[0] if classifier else None, "jar")
    with TemporaryDirectory() as folder:
        content = fetch_artifact(artifact, Path(folder), _silently).read_bytes()
    return f"{coordinates} {len(content)} {sha256(content).hexdigest()}"


def main() -> None:
    """Print the lines in order."""
    names = sorted({line.strip() for line in sys.stdin if line.strip()})
    with ThreadPoolExecutor(_THREADS) as pool:
        print(*pool.map(line_of, names), sep="\n")


if __name__ == "__main__":
    main()
