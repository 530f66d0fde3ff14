"""The Pulsar server distribution: fetched once, checked, unpacked into the user's cache.

Only a folder that was renamed into place counts as installed. Everything before that happens in a
temporary folder under a lock, so an interrupted download, a half-unpacked folder, and two processes
at once do no harm; what dead processes left behind is removed by the next one that holds the lock.
"""

from __future__ import annotations

import errno
import hashlib
import re
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from keyshard.errors import ConfigError, DevBrokerError
from keyshard.testing.devbroker.cache import cache_dir, file_lock
from keyshard.testing.devbroker.fetch import Fetch, NotInRepositoryError, fetch_artifact
from keyshard.testing.devbroker.progress import Announcer

DEFAULT_VERSION = "4.0.8"
"""Pulsar version that is used when none is named."""

_ARCHIVE = "tar.gz"
_ATTEMPTS_MAX = 3
_LOCK_TIMEOUT_S = 900.0
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
_VERSION = re.compile(r"\d+(\.\d+)+([.-][A-Za-z0-9.-]+)?")


def installed(version: str = DEFAULT_VERSION) -> Path | None:
    """Folder of an installed distribution, or ``None``.

    Raises:
        ConfigError: ``version`` is no version number.
    """
    home = _home(version)
    return home if (home / "bin" / "pulsar").is_file() else None


def install(version: str = DEFAULT_VERSION, *, fetch: Fetch = fetch_artifact) -> Path:
    """Folder of the distribution; it is fetched when it is not installed yet.

    Args:
        version: Pulsar version, such as ``4.0.8``.
        fetch: Brings one artifact of the distribution into a folder.

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
            lambda: announcer.say(f"Another process is fetching Apache Pulsar {version}; waiting."),
        ):
            return installed(version) or _install_locked(version, root, fetch, announcer)
    except OSError as exc:
        raise DevBrokerError(
            f"Apache Pulsar {version} cannot be stored in {root}: {exc}. Free some space (about "
            "900 MB while unpacking), or set KEYSHARD_CACHE to another directory."
        ) from exc


def _home(version: str) -> Path:
    if not _VERSION.fullmatch(version):
        raise ConfigError(f"{version!r} is no Pulsar version. Write one such as 4.0.8.")
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
    """Algorithm and expected digest: the strongest checksum the repository has."""
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
        f"The checksum of Apache Pulsar {version} cannot be read, so what is fetched cannot be "
        "checked. Try again later."
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
    """Fetch one artifact; every attempt has a folder of its own, so no half file is taken."""

    def attempt() -> Path:
        folder = Path(tempfile.mkdtemp(dir=work))
        return fetch(version, packaging, folder, announcer.download)

    def worth_it(exc: BaseException) -> bool:
        if isinstance(exc, NotInRepositoryError):  # Also what a busy repository looks like.
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
            f"Apache Pulsar {version} could not be fetched: {_first_line(exc)}. It is needed once "
            "(about 250 MB): connect to the network and try again, or copy the folder "
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
            f"The {algorithm} checksum of {archive.name} is {digest.hexdigest()}, expected "
            f"{expected}: it was damaged or changed on the way, and is not used. Try again."
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
            else:  # Python 3.10 and 3.11 before the filter was brought to them.
                tar.extractall(target, members=_only_safe(members))
    except (tarfile.TarError, EOFError, zlib.error) as exc:
        raise DevBrokerError(f"{archive.name} cannot be unpacked: {exc}.") from exc
    homes = [path.parent.parent for path in target.glob("*/bin/pulsar")]
    if len(homes) != 1:
        raise DevBrokerError(f"{archive.name} is no Pulsar distribution: it has no bin/pulsar.")
    return homes[0]


def _following(
    tar: tarfile.TarFile, tell: Callable[[], int], advance: Callable[[int], None]
) -> Iterator[tarfile.TarInfo]:
    """The members of an archive, telling how far it was read."""
    done = 0
    for member in tar:
        yield member
        now = tell()
        advance(now - done)
        done = now


def _only_safe(members: Iterator[tarfile.TarInfo]) -> Iterator[tarfile.TarInfo]:
    """Refuse members that could write outside the target folder."""
    for member in members:
        name = PurePosixPath(member.name)
        inside = not name.is_absolute() and ".." not in name.parts
        if not inside or not (member.isfile() or member.isdir()):
            raise tarfile.ReadError(f"member {member.name!r} is not allowed")
        yield member
