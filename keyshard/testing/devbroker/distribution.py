"""The Pulsar server distribution: fetched once, verified, unpacked into the user's cache.

Only a folder that was renamed into place counts as installed. Everything before that happens in a
temporary folder under a lock. So an interrupted download, a half-unpacked folder, and two processes
at once do no harm. The next process with the lock removes the leftovers of dead ones.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import hashlib
import os
import re
import shutil
import tarfile
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path, PurePosixPath
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from keyshard.errors import ConfigError, DevBrokerError

_GROUP = "org.apache.pulsar"
_ARTIFACT = "pulsar-server-distribution"
_CLASSIFIER = "bin"
_TIMEOUT_S = 30

OnDownload = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Takes a file name and its size in bytes; yields a function that takes the bytes received."""


class NotInRepositoryError(Exception):
    """The repository does not have the artifact, or does not serve it now."""


class Fetch(Protocol):
    """Fetches one artifact of the distribution into a folder."""

    def __call__(self, version: str, packaging: str, into: Path, on_download: OnDownload) -> Path:
        """Fetch an artifact.

        Args:
            version: Pulsar version.
            packaging: End of the file name: ``tar.gz``, or that of a checksum.
            into: An empty folder.
            on_download: Called for the progress.

        Raises:
            NotInRepositoryError: The repository does not have it.
            OSError: The network or the disk failed; written files are unusable.
        """


def fetch_artifact(version: str, packaging: str, into: Path, on_download: OnDownload) -> Path:
    """Fetch an artifact from the Maven repository; see :class:`Fetch`.

    Raises:
        DevBrokerError: The package that reads Maven repositories is not installed.
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
        # The package leaves connections to the garbage collector, which would warn the user.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()


DEFAULT_VERSION = "4.0.8"
"""Pulsar version that is used by default."""

_ARCHIVE = "tar.gz"
_ATTEMPTS_MAX = 3
_LOCK_TIMEOUT_S = 900.0
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
_VERSION = re.compile(r"\d+(\.\d+)+([.-][A-Za-z0-9.-]+)?")


def installed(version: str = DEFAULT_VERSION) -> Path | None:
    """Return the folder of an installed distribution, or ``None``.

    Raises:
        ConfigError: ``version`` is no version number.
    """
    home = _home(version)
    return home if (home / "bin" / "pulsar").is_file() else None


def install(version: str = DEFAULT_VERSION, *, fetch: Fetch = fetch_artifact) -> Path:
    """Return the folder of the distribution; fetch it if it is not installed.

    Args:
        version: Pulsar version, such as ``4.0.8``.
        fetch: Fetches one artifact of the distribution into a folder.

    Raises:
        ConfigError: ``version`` is no version number.
        DevBrokerError: It cannot be fetched, its checksum differs, or it cannot be unpacked.
    """
    home = installed(version)
    if home is not None:
        return home
    announcer = Announcer()
    root = _home(version).parent
    try:
        with file_lock(
            root / f".lock-{version}",
            _LOCK_TIMEOUT_S,
            lambda: announcer.say(
                f"Another process downloads Apache Pulsar {version}; waiting for it."
            ),
        ):
            return installed(version) or _install_locked(version, root, fetch, announcer)
    except OSError as exc:
        raise DevBrokerError(
            f"Apache Pulsar {version} cannot be stored in {root}: {exc}. Unpacking needs about "
            "900 MB: free some space, or set KEYSHARD_CACHE to another directory."
        ) from exc


def _home(version: str) -> Path:
    if not _VERSION.fullmatch(version):
        raise ConfigError(f"{version!r} is not a Pulsar version. Write a version such as 4.0.8.")
    return cache_dir() / "pulsar" / version


def _install_locked(version: str, root: Path, fetch: Fetch, announcer: Announcer) -> Path:
    prefix = f".tmp-{version}-"
    for leftover in root.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    home = _home(version)
    if home.exists():  # Not ours: a folder in this place without bin/pulsar.
        shutil.rmtree(home)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
    try:
        algorithm, digest = _fetch_checksum(version, fetch, work, announcer)
        archive = _fetch_retrying(version, _ARCHIVE, fetch, work, announcer)
        _verify(archive, algorithm, digest)
        unpacked = _unpack(archive, work / "unpacked", announcer)
        unpacked.rename(home)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return home


def _fetch_checksum(
    version: str, fetch: Fetch, work: Path, announcer: Announcer
) -> tuple[str, str]:
    """Return algorithm and expected digest of the strongest checksum in the repository."""
    for algorithm, last in (("sha512", False), ("sha1", True)):
        try:
            path = _fetch_retrying(
                version, f"{_ARCHIVE}.{algorithm}", fetch, work, announcer, missing_ok=not last
            )
        except NotInRepositoryError:
            continue
        words = path.read_text(errors="replace").split()
        size = hashlib.new(algorithm).digest_size * 2
        if words and re.fullmatch(rf"[0-9a-fA-F]{{{size}}}", words[0]):
            return algorithm, words[0].lower()
    raise DevBrokerError(
        f"The checksum of Apache Pulsar {version} cannot be read, so the download cannot be "
        "verified. Try again later."
    )


def _fetch_retrying(
    version: str,
    packaging: str,
    fetch: Fetch,
    work: Path,
    announcer: Announcer,
    *,
    missing_ok: bool = False,
) -> Path:
    """Fetch one artifact; each attempt has its own folder, so no partial file is used."""

    def attempt() -> Path:
        folder = Path(tempfile.mkdtemp(dir=work))
        return fetch(version, packaging, folder, announcer.download)

    def worth_it(exc: BaseException) -> bool:
        if isinstance(exc, NotInRepositoryError):  # A busy repository looks the same.
            return not missing_ok
        return isinstance(exc, OSError) and exc.errno not in _FULL_DISK

    retrying = Retrying(
        stop=stop_after_attempt(_ATTEMPTS_MAX),
        wait=wait_random_exponential(multiplier=0.5, max=5),
        retry=retry_if_exception(worth_it),
        reraise=True,
    )
    try:
        return retrying(attempt)
    except NotInRepositoryError as exc:
        if missing_ok:
            raise
        raise DevBrokerError(
            f"Apache Pulsar {version} was not found in the Maven repository ({exc}). Check the "
            f"version; {DEFAULT_VERSION} is the default.",
            version=version,
        ) from exc
    except OSError as exc:
        if exc.errno in _FULL_DISK:
            raise
        raise DevBrokerError(
            f"Apache Pulsar {version} could not be downloaded: {_first_line(exc)}. It is needed "
            "once (about 250 MB). Connect to the network and try again, or copy the folder "
            f"{_home(version)} from a machine that has it.",
            version=version,
        ) from exc


def _first_line(exc: BaseException) -> str:
    lines = str(exc).splitlines()
    return lines[0].rstrip(".") if lines else type(exc).__name__


def _verify(archive: Path, algorithm: str, expected: str) -> None:
    digest = hashlib.new(algorithm)
    with archive.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != expected:
        raise DevBrokerError(
            f"The {algorithm} checksum of {archive.name} is {digest.hexdigest()}, but {expected} "
            "was expected. The download is damaged or changed, and is not used. Try again."
        )


def _unpack(archive: Path, target: Path, announcer: Announcer) -> Path:
    """Unpack into ``target`` and return the one folder in it that holds the distribution."""
    target.mkdir()
    size = archive.stat().st_size
    try:
        with (
            archive.open("rb") as raw,
            announcer.progress(f"Unpacking {archive.name}", size) as advance,
            tarfile.open(fileobj=raw, mode="r:gz") as tar,
        ):
            members = _following(tar, raw.tell, advance)
            if hasattr(tarfile, "data_filter"):
                tar.extractall(target, members=members, filter="data")
            else:  # Early releases of Python 3.10 and 3.11 lack the filter.
                tar.extractall(target, members=_only_safe(members))
    except (tarfile.TarError, EOFError, zlib.error) as exc:
        raise DevBrokerError(f"{archive.name} cannot be unpacked: {exc}. Try again.") from exc
    homes = [path.parent.parent for path in target.glob("*/bin/pulsar")]
    if len(homes) != 1:
        raise DevBrokerError(
            f"{archive.name} is not a Pulsar distribution: it has no bin/pulsar. Check the version."
        )
    return homes[0]


def _following(
    tar: tarfile.TarFile, tell: Callable[[], int], advance: Callable[[int], None]
) -> Iterator[tarfile.TarInfo]:
    """Yield the members of an archive, and report how far it was read."""
    done = 0
    for member in tar:
        yield member
        now = tell()
        advance(now - done)
        done = now


def _only_safe(members: Iterator[tarfile.TarInfo]) -> Iterator[tarfile.TarInfo]:
    """Yield members, and refuse those that could write outside the target folder."""
    for member in members:
        name = PurePosixPath(member.name)
        inside = not name.is_absolute() and ".." not in name.parts
        if not inside or not (member.isfile() or member.isdir()):
            raise tarfile.ReadError(f"member {member.name!r} is not allowed")
        yield member


# -- The cache directory ---------------------------------------------------------------------------

_POLL_S = 0.1


def cache_dir() -> Path:
    """Return the directory for files that keyshard downloads or records; it may not exist yet.

    ``$KEYSHARD_CACHE``, or else ``$XDG_CACHE_HOME/keyshard``, or else ``~/.cache/keyshard``.
    """
    own = os.environ.get("KEYSHARD_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME")
    base = Path(shared).expanduser() if shared else Path.home() / ".cache"
    return (base / "keyshard").absolute()


@contextmanager
def file_lock(
    path: Path, timeout_s: float, on_wait: Callable[[], None] | None = None
) -> Iterator[None]:
    """Hold an exclusive lock on ``path`` between processes; it ends with its process.

    Args:
        path: The lock file; it is created and stays.
        timeout_s: Longest wait for another holder, seconds.
        on_wait: Called once if another process holds the lock.

    Raises:
        DevBrokerError: Another process held the lock until the deadline.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout_s
    waited = False
    with path.open("a") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise DevBrokerError(
                        f"Another process held {path} for {timeout_s:g} s. End that process, "
                        "then try again."
                    ) from None
                if on_wait is not None and not waited:
                    on_wait()
                waited = True
                time.sleep(_POLL_S)
        yield


# -- Progress on stderr of large downloads and archives --------------------------------------------

_WORTH_TELLING_BYTES = 1_000_000


class Announcer:
    """Shows a progress bar per piece of work on a terminal, and one line each elsewhere."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console if console is not None else Console(stderr=True)

    def say(self, text: str) -> None:
        """Print one line."""
        self._console.print(text, highlight=False, soft_wrap=True)

    @contextmanager
    def download(self, name: str, size_bytes: int) -> Iterator[Callable[[int], None]]:
        """Show the progress of one download; small files are not shown."""
        if size_bytes < _WORTH_TELLING_BYTES:
            yield lambda _count: None
        else:
            with self.progress(f"Fetching {name}", size_bytes) as advance:
                yield advance

    @contextmanager
    def progress(self, what: str, size_bytes: int) -> Iterator[Callable[[int], None]]:
        """Show the progress of some work; yields a function that takes the number of bytes done."""
        if not self._console.is_terminal:
            self.say(f"{what} ({size_bytes / 1e6:.0f} MB)")
            yield lambda _count: None
            return
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=self._console,
        ) as bars:
            task = bars.add_task(what, total=size_bytes)
            yield lambda count: bars.update(task, advance=count)
            bars.update(task, completed=size_bytes)
