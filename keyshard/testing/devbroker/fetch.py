"""Fetching one artifact of the Pulsar server distribution by its Maven coordinates."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from keyshard.errors import DevBrokerError

_GROUP = "org.apache.pulsar"
_ARTIFACT = "pulsar-server-distribution"
_CLASSIFIER = "bin"
_TIMEOUT_S = 30

OnDownload = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Given a file name and its bytes, yields a function that is told how many bytes came."""


class NotInRepositoryError(Exception):
    """The repository does not have the artifact, or does not serve it now."""


class Fetch(Protocol):
    """Brings one artifact of the distribution into a folder."""

    def __call__(self, version: str, packaging: str, into: Path, on_download: OnDownload) -> Path:
        """Fetch an artifact.

        Args:
            version: Pulsar version.
            packaging: End of the file name: ``tar.gz``, or that of a checksum.
            into: An empty folder.
            on_download: Is told about the progress.

        Raises:
            NotInRepositoryError: The repository does not have it.
            OSError: The network or the disk failed; what was written is of no use.
        """


def fetch_artifact(version: str, packaging: str, into: Path, on_download: OnDownload) -> Path:
    """Fetch an artifact from the Maven repository; see :class:`Fetch`.

    Raises:
        DevBrokerError: The package that knows Maven is not installed.
    """
    try:
        from jgo.maven import MavenContext, PythonResolver  # noqa: PLC0415 - an extra
    except ImportError as exc:
        raise DevBrokerError(
            "Fetching Apache Pulsar needs the package jgo. Run pip install 'keyshard[broker]'."
        ) from exc
    context = MavenContext(
        repo_cache=into,
        local_repos=[],
        resolver=PythonResolver(progress_callback=on_download),
        timeout=_TIMEOUT_S,
    )
    artifact = (
        context.project(_GROUP, _ARTIFACT)
        .at_version(version)
        .artifact(classifier=_CLASSIFIER, packaging=packaging)
    )
    try:
        return Path(artifact.resolve())
    except RuntimeError as exc:
        raise NotInRepositoryError(f"{_GROUP}:{_ARTIFACT}:{version}, {packaging}") from exc
    finally:
        # It leaves connections to the garbage collector, whose warning would come to anybody.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
