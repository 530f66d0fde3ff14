"""The jars of Pulsar's broker: fetched once, verified, and stored in the user's cache.

Releases up to 4.0.8 have a distribution archive in the Maven repository. The jars of later ones are
fetched one by one; their names and checksums are in the folder ``releases``.

Only a folder that was renamed into place counts as installed. Everything before that happens in a
temporary folder under a lock. So an interrupted download, a half-unpacked folder, and two processes
at once do no harm. The next process with the lock removes the leftovers of dead ones.
"""

from __future__ import annotations

import errno
import gc
import hashlib
import re
import shutil
import tarfile
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Protocol

from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from keyshard.base_error import first_line
from keyshard.core.releases import DEFAULT_VERSION, TESTED
from keyshard.errors import ConfigError, DevBrokerError
from keyshard.testing.devbroker.cache import Announcer, cache_dir, file_lock

RELEASES = Path(__file__).with_name("releases")
"""Folder with the jars of releases, and with the configuration of brokers made of them."""
_TIMEOUT_S = 30
_THREADS = 8
"""Jars that are fetched at once."""

OnDownload = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Takes a file name and its size in bytes; yields a function that takes the bytes received."""


class NotInRepositoryError(Exception):
    """The repository does not have the artifact, or does not serve it now."""


class Artifact(NamedTuple):
    """A file in a Maven repository."""

    group: str
    name: str
    version: str
    classifier: str | None
    packaging: str
    """End of the file name, such as ``jar`` or ``tar.gz.sha512``."""


class Jar(NamedTuple):
    """A jar of a release."""

    artifact: Artifact
    size_bytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        """Name of the file in the class path; two groups may have a name in common."""
        group, name, version, classifier, _ = self.artifact
        return f"{group}.{name}-{version}{f'-{classifier}' if classifier else ''}.jar"


class Fetch(Protocol):
    """Fetches one artifact into a folder."""

    def __call__(self, artifact: Artifact, into: Path, on_download: OnDownload, /) -> Path:
        """Fetch an artifact.

        Args:
            artifact: The artifact.
            into: An empty folder.
            on_download: Called for the progress.

        Raises:
            NotInRepositoryError: The repository does not have it.
            OSError: The network or the disk failed; written files are unusable.
        """


def fetch_artifact(artifact: Artifact, into: Path, on_download: OnDownload) -> Path:
    """Fetch an artifact from the Maven repository; see :class:`Fetch`.

    Raises:
        DevBrokerError: The package that reads Maven repositories is not installed.
    """
    try:
        from jgo.maven import MavenContext, PythonResolver  # noqa: PLC0415 - an extra
    except ImportError as exc:
        raise DevBrokerError(
            "Fetching Apache Pulsar needs the package jgo.", "Run pip install 'keyshard[broker]'."
        ) from exc
    context = MavenContext(
        repo_cache=into,
        local_repos=[],
        resolver=PythonResolver(progress_callback=on_download),
        timeout=_TIMEOUT_S,
    )
    project = context.project(artifact.group, artifact.name).at_version(artifact.version)
    try:
        # It reads no pom: some parents are in no repository.
        return Path(project.artifact(artifact.classifier or "", artifact.packaging).resolve())
    except RuntimeError as exc:
        raise NotInRepositoryError(":".join(map(str, artifact))) from exc


_ATTEMPTS_MAX = 3
_LOCK_TIMEOUT_S = 900.0
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
_VERSION = re.compile(r"\d+(\.\d+)+([.-][A-Za-z0-9.-]+)?")


def installed(version: str = DEFAULT_VERSION) -> Path | None:
    """Return the folder of an installed release, or ``None``.

    Raises:
        ConfigError: ``version`` is no version number.
    """
    home = _home(version)
    return home if any((home / "lib").glob("*.jar")) else None


def install(version: str = DEFAULT_VERSION, *, fetch: Fetch = fetch_artifact) -> Path:
    """Return the folder of a release, with its jars in ``lib``; fetch it if it is not installed.

    Args:
        version: Pulsar version, such as ``4.0.8``.
        fetch: Fetches one artifact into a folder.

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
            f"Apache Pulsar {version} cannot be stored in {root}: {exc}. It needs up to 900 MB.",
            "Free some space, or set KEYSHARD_CACHE to another directory.",
        ) from exc
    finally:
        # jgo leaves connections to the garbage collector, which would warn the user.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()


def template(home: Path, name: str) -> str:
    """Return the configuration of a program to which settings are added.

    Args:
        home: Folder of the release. An archive contains the configuration of its own release.
        name: Name of the file, such as ``broker.conf``.

    Raises:
        OSError: It cannot be read.
    """
    for folder in (home / "conf", RELEASES):
        path = folder / name
        if path.exists():
            return path.read_text()
    return ""


def _home(version: str) -> Path:
    if not _VERSION.fullmatch(version):
        raise ConfigError(f"{version!r} is not a Pulsar version.", "Write a version such as 4.0.8.")
    return cache_dir() / "pulsar" / version


def _install_locked(version: str, root: Path, fetch: Fetch, announcer: Announcer) -> Path:
    prefix = f".tmp-{version}-"
    for leftover in root.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    home = _home(version)
    if home.exists():  # It has no jars, so no installation made it.
        shutil.rmtree(home)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
    try:
        jars = jars_of(version)
        if jars:
            made = _fetch_jars(version, jars, fetch, work, announcer)
        else:
            made = _fetch_archive(version, fetch, work, announcer)
        made.rename(home)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return home


# -- Jar by jar ------------------------------------------------------------------------------------


def jars_of(version: str) -> list[Jar]:
    """Return the jars of a release; none if its distribution archive is fetched."""
    path = RELEASES / f"{version}.lock"
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        coordinates, size, digest = line.split()
        group, name, number, *classifier = coordinates.split(":")
        artifact = Artifact(group, name, number, classifier[0] if classifier else None, "jar")
        found.append(Jar(artifact, int(size), digest))
    return found


def _locked() -> list[str]:
    """Return the releases that are fetched jar by jar."""
    return [path.stem for path in RELEASES.glob("*.lock")]


def _fetch_jars(
    version: str, jars: Sequence[Jar], fetch: Fetch, work: Path, announcer: Announcer
) -> Path:
    """Fetch and check every jar of a release; return the folder of the release."""
    home = work / "home"
    lib = home / "lib"
    lib.mkdir(parents=True)

    def take(jar: Jar) -> int:
        file = _fetch_retrying(version, jar.artifact, fetch, work, _silently)
        _verify(file, "sha256", jar.sha256)
        file.rename(lib / jar.file_name)
        return jar.size_bytes

    size_bytes = sum(jar.size_bytes for jar in jars)
    with (
        announcer.progress(f"Fetching Apache Pulsar {version}", size_bytes) as advance,
        ThreadPoolExecutor(_THREADS, "keyshard-fetch") as pool,
    ):
        fetched = [pool.submit(take, jar) for jar in jars]
        try:
            for one in fetched:
                advance(one.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return home


@contextmanager
def _silently(_name: str, _size_bytes: int) -> Iterator[Callable[[int], None]]:
    yield lambda _count: None


# -- The distribution archive ----------------------------------------------------------------------


def _fetch_archive(version: str, fetch: Fetch, work: Path, announcer: Announcer) -> Path:
    """Fetch, check and unpack the archive of a release; return the folder of the release."""
    algorithm, digest = _fetch_checksum(version, fetch, work, announcer)
    archive = _fetch_retrying(version, _archive(version), fetch, work, announcer.download)
    _verify(archive, algorithm, digest)
    return _unpack(archive, work / "unpacked", announcer)


def _archive(version: str, checksum: str = "") -> Artifact:
    name = "pulsar-server-distribution"
    return Artifact("org.apache.pulsar", name, version, "bin", f"tar.gz{checksum}")


def _fetch_checksum(
    version: str, fetch: Fetch, work: Path, announcer: Announcer
) -> tuple[str, str]:
    """Return algorithm and expected digest of the strongest checksum in the repository."""
    for algorithm, last in (("sha512", False), ("sha1", True)):
        try:
            path = _fetch_retrying(
                version,
                _archive(version, f".{algorithm}"),
                fetch,
                work,
                announcer.download,
                missing_ok=not last,
            )
        except NotInRepositoryError:
            continue
        words = path.read_text(errors="replace").split()
        size = hashlib.new(algorithm).digest_size * 2
        if words and re.fullmatch(rf"[0-9a-fA-F]{{{size}}}", words[0]):
            return algorithm, words[0].lower()
    raise DevBrokerError(
        f"The checksum of Apache Pulsar {version} cannot be read, so the download cannot be "
        "verified.",
        "Try again later.",
    )


def _fetch_retrying(
    version: str,
    artifact: Artifact,
    fetch: Fetch,
    work: Path,
    on_download: OnDownload,
    *,
    missing_ok: bool = False,
) -> Path:
    """Fetch one artifact; each attempt has its own folder, so no partial file is used."""

    def attempt() -> Path:
        folder = Path(tempfile.mkdtemp(dir=work))
        return fetch(artifact, folder, on_download)

    def worth_it(exc: BaseException) -> bool:
        if isinstance(exc, NotInRepositoryError):  # A busy repository may raise it, too.
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
            f"Apache Pulsar {version} was not found in the Maven repository ({exc}).",
            f"Use {', '.join(sorted({*TESTED, *_locked()}))}, or another release that has a "
            "distribution archive there.",
            version=version,
        ) from exc
    except OSError as exc:
        if exc.errno in _FULL_DISK:
            raise
        reason = first_line(exc).rstrip(".") or type(exc).__name__
        raise DevBrokerError(
            f"Apache Pulsar {version} could not be downloaded: {reason}. It is needed once (about "
            "250 MB).",
            f"Connect to the network and try again, or copy the folder {_home(version)} from a "
            "machine that has it.",
            version=version,
        ) from exc


def _verify(archive: Path, algorithm: str, expected: str) -> None:
    digest = hashlib.new(algorithm)
    with archive.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != expected:
        raise DevBrokerError(
            f"The {algorithm} checksum of {archive.name} is {digest.hexdigest()}, but {expected} "
            "was expected. The download is damaged or changed, and is not used.",
            "Try again.",
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
        raise DevBrokerError(f"{archive.name} cannot be unpacked: {exc}.", "Try again.") from exc
    homes = [path.parent for path in target.glob("*/lib") if any(path.glob("*.jar"))]
    if len(homes) != 1:
        raise DevBrokerError(
            f"{archive.name} is not a Pulsar distribution: it has no jars.", "Check the version."
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
