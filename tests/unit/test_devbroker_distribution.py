"""Fetching the distribution: only a whole, checked folder counts."""

from __future__ import annotations

import errno
import hashlib
import io
import multiprocessing
import tarfile
from pathlib import Path

import pytest

from keyshard.errors import ConfigError, DevBrokerError
from keyshard.testing.devbroker import distribution
from keyshard.testing.devbroker.distribution import Artifact, NotInRepositoryError, OnDownload
from tests.support.deadlines import deadline

VERSION = "9.9.9"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KEYSHARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(distribution, "wait_random_exponential", _no_wait)
    return tmp_path / "cache" / "pulsar"


def _no_wait(multiplier: float, max: float) -> object:  # noqa: A002
    return lambda _state: 0


def archive(names: tuple[str, ...] = ("bin/pulsar", "conf/standalone.conf", "lib/a.jar")) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name in names:
            data = name.encode() * 50
            info = tarfile.TarInfo(f"apache-pulsar-{VERSION}/{name}")
            info.size, info.mode = len(data), 0o755
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


class Repository:
    """A repository that the test controls; counts its requests."""

    def __init__(self, data: bytes | None = None, checksums: tuple[str, ...] = ("sha512",)) -> None:
        self.data = archive() if data is None else data
        self.served = self.data
        self.checksums = checksums
        self.failures: list[Exception] = []
        self.asked: list[str] = []

    def __call__(self, artifact: Artifact, into: Path, on_download: OnDownload) -> Path:
        packaging = artifact.packaging
        self.asked.append(packaging)
        target = into / f"pulsar-{artifact.version}.{packaging}"
        algorithm = packaging.removeprefix("tar.gz").removeprefix(".")
        if algorithm:
            if algorithm not in self.checksums:
                raise NotInRepositoryError(packaging)
            target.write_text(hashlib.new(algorithm, self.data).hexdigest() + "  a-name\n")
            return target
        if self.failures:
            target.write_bytes(self.served[: len(self.served) // 2])
            raise self.failures.pop(0)
        with on_download(target.name, len(self.served)) as advance:
            target.write_bytes(self.served)
            advance(len(self.served))
        return target


def test_it_is_fetched_once(cache: Path) -> None:
    repository = Repository()
    assert distribution.installed(VERSION) is None
    home = distribution.install(VERSION, fetch=repository)
    assert home == cache / VERSION == distribution.installed(VERSION)
    assert (home / "bin" / "pulsar").stat().st_mode & 0o111
    assert distribution.install(VERSION, fetch=repository) == home
    assert repository.asked == ["tar.gz.sha512", "tar.gz"]
    assert [path.name for path in sorted(cache.iterdir())] == [f".lock-{VERSION}", VERSION]


def test_sha1_is_used_where_there_is_no_sha512() -> None:
    repository = Repository(checksums=("sha1",))
    distribution.install(VERSION, fetch=repository)
    assert repository.asked == ["tar.gz.sha512", "tar.gz.sha1", "tar.gz"]


@pytest.mark.parametrize("checksums", [("sha512",), ("sha1",)])
def test_a_wrong_checksum_is_refused(cache: Path, checksums: tuple[str, ...]) -> None:
    repository = Repository(checksums=checksums)
    repository.served = archive(("lib/evil.jar",))
    with pytest.raises(DevBrokerError, match=f"{checksums[0]} checksum.*is not used"):
        distribution.install(VERSION, fetch=repository)
    assert distribution.installed(VERSION) is None
    assert [path.name for path in cache.iterdir()] == [f".lock-{VERSION}"]


def test_without_any_checksum_nothing_is_used() -> None:
    with pytest.raises(DevBrokerError, match="was not found"):
        distribution.install(VERSION, fetch=Repository(checksums=()))
    assert distribution.installed(VERSION) is None


def test_an_interrupted_download_is_not_taken_and_is_tried_again() -> None:
    repository = Repository()
    repository.failures = [ConnectionError("reset"), ConnectionError("reset")]
    home = distribution.install(VERSION, fetch=repository)
    assert (home / "lib" / "a.jar").read_bytes() == b"lib/a.jar" * 50
    assert repository.asked.count("tar.gz") == 3


def test_offline_names_the_missing_file_and_a_remedy() -> None:
    repository = Repository()
    repository.failures = [ConnectionError("no route to host")] * 9
    with pytest.raises(DevBrokerError, match=r"(?s)9\.9\.9 could not.*: no route.*network"):
        distribution.install(VERSION, fetch=repository)
    assert repository.asked.count("tar.gz") == 3
    assert distribution.installed(VERSION) is None


def test_a_full_disk_is_not_taken_for_a_bad_network() -> None:
    repository = Repository()
    repository.failures = [OSError(errno.ENOSPC, "No space left on device")]
    with pytest.raises(DevBrokerError, match=r"(?s)No space left on device.*KEYSHARD_CACHE"):
        distribution.install(VERSION, fetch=repository)
    assert repository.asked.count("tar.gz") == 1


def test_leftovers_of_dead_processes_do_not_count_and_are_removed(cache: Path) -> None:
    half = cache / f".tmp-{VERSION}-dead" / "unpacked" / "apache-pulsar" / "lib"
    half.mkdir(parents=True)
    (half / "a.jar").write_text("half")
    (cache / VERSION / "lib").mkdir(parents=True)
    assert distribution.installed(VERSION) is None
    home = distribution.install(VERSION, fetch=Repository())
    assert (home / "lib" / "a.jar").read_bytes() == b"lib/a.jar" * 50
    assert not list(cache.glob(".tmp-*"))


def test_a_cut_archive_with_a_right_checksum_is_refused() -> None:
    whole = archive()
    with pytest.raises(DevBrokerError, match=r"cannot be unpacked|not a Pulsar distribution"):
        distribution.install(VERSION, fetch=Repository(whole[: len(whole) // 2]))
    assert distribution.installed(VERSION) is None


@pytest.mark.parametrize("builtin", [True, False])
def test_members_outside_the_folder_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, builtin: bool
) -> None:
    if not builtin:
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    evil = archive(("lib/a.jar", "../../../evil"))
    with pytest.raises(DevBrokerError, match="cannot be unpacked"):
        distribution.install(VERSION, fetch=Repository(evil))
    assert not list(tmp_path.rglob("evil"))


def test_an_archive_of_something_else_is_refused() -> None:
    with pytest.raises(DevBrokerError, match="it has no jars"):
        distribution.install(VERSION, fetch=Repository(archive(("README",))))


def test_a_release_without_archive_names_those_that_can_be_had() -> None:
    with pytest.raises(DevBrokerError, match=r"(?s)was not found.*4\.0\.8.*5\.0\.1"):
        distribution.install(VERSION, fetch=Repository(checksums=()))


# -- Releases whose jars are fetched one by one ----------------------------------------------------

JARS = ("a.b:core:1", "c.d:core:1", "a.b:native:2:linux-x86_64")
"""Two groups have a jar of one name."""


class Jars:
    """A repository of jars; each has its coordinates as content."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.failures: dict[str, Exception] = {}
        self.changed = ""

    def __call__(self, artifact: Artifact, into: Path, _on_download: OnDownload) -> Path:
        name = ":".join(part for part in artifact[:4] if part)
        assert artifact.packaging == "jar"
        self.asked.append(name)
        target = into / "file.jar"
        target.write_text("changed" if name == self.changed else name)
        if name in self.failures:
            raise self.failures.pop(name)
        return target


@pytest.fixture
def locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that is fetched jar by jar."""
    releases = tmp_path / "releases"
    releases.mkdir()
    lines = [f"{name} {len(name)} {hashlib.sha256(name.encode()).hexdigest()}\n" for name in JARS]
    (releases / f"{VERSION}.lock").write_text("".join(lines))
    monkeypatch.setattr(distribution, "RELEASES", releases)


@pytest.mark.usefixtures("locked")
def test_every_jar_of_a_release_is_fetched_once(cache: Path) -> None:
    repository = Jars()
    home = distribution.install(VERSION, fetch=repository)
    assert home == cache / VERSION
    jars = {path.name: path.read_text() for path in (home / "lib").iterdir()}
    assert jars == {
        "a.b.core-1.jar": JARS[0], "c.d.core-1.jar": JARS[1],
        "a.b.native-2-linux-x86_64.jar": JARS[2],
    }  # fmt: skip
    assert distribution.install(VERSION, fetch=repository) == home
    assert sorted(repository.asked) == sorted(JARS)


@pytest.mark.usefixtures("locked")
def test_a_jar_that_was_cut_off_is_fetched_again() -> None:
    repository = Jars()
    repository.failures = {JARS[1]: ConnectionError("reset")}
    distribution.install(VERSION, fetch=repository)
    assert repository.asked.count(JARS[1]) == 2


@pytest.mark.usefixtures("locked")
def test_a_changed_jar_is_refused(cache: Path) -> None:
    repository = Jars()
    repository.changed = JARS[2]
    with pytest.raises(DevBrokerError, match=r"sha256 checksum.*is not used"):
        distribution.install(VERSION, fetch=repository)
    assert distribution.installed(VERSION) is None
    assert [path.name for path in cache.iterdir()] == [f".lock-{VERSION}"]


@pytest.mark.parametrize("version", ["4.2.4", "5.0.1"])
def test_the_jars_of_a_release_are_distinct_and_have_one_broker_of_its_version(
    version: str,
) -> None:
    jars = distribution.jars_of(version)
    assert len({jar.file_name for jar in jars}) == len(jars)
    broker = [jar for jar in jars if jar.file_name.startswith("org.apache.pulsar.pulsar-broker-")]
    assert [jar.artifact.version for jar in broker if jar.artifact.name == "pulsar-broker"] == [
        version
    ]
    assert all(len(bytes.fromhex(jar.sha256)) == 32 and jar.size_bytes > 0 for jar in jars)


def test_an_archive_has_the_configuration_of_its_own_release(tmp_path: Path) -> None:
    """The configuration of Pulsar 4.0 has old defaults, which later releases have changed."""
    own = distribution.template(tmp_path, "standalone.conf")
    assert "clusterName=standalone" in own
    assert "dispatcherMaxReadBatchSize" not in own
    for name in ("standalone.conf", "bookkeeper.conf"):
        # Otherwise the bookie refuses entries of the largest messages.
        assert "nettyMaxFrameSizeBytes=5253120" in distribution.template(tmp_path, name)
    assert distribution.template(tmp_path, "broker.conf") == ""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "standalone.conf").write_text("of the archive")
    assert distribution.template(tmp_path, "standalone.conf") == "of the archive"


@pytest.mark.parametrize("version", ["", "4", "../4.0.8", "4.0.8/..", "latest", "4.0.8 "])
def test_an_invalid_version_is_refused(version: str) -> None:
    with pytest.raises(ConfigError, match="not a Pulsar version"):
        distribution.install(version, fetch=Repository())


def _install_in_process(queue: multiprocessing.Queue[str]) -> None:
    queue.put(str(distribution.install(VERSION, fetch=Repository())))


def test_two_processes_at_once_end_with_one_good_folder(cache: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.Queue[str] = context.Queue()
    processes = [context.Process(target=_install_in_process, args=(queue,)) for _ in range(3)]
    for process in processes:
        process.start()
    homes = {queue.get(timeout=deadline(30)) for _ in processes}
    for process in processes:
        process.join(deadline(30))
    assert homes == {str(cache / VERSION)}
    assert (cache / VERSION / "lib" / "a.jar").read_bytes() == b"lib/a.jar" * 50
    assert not list(cache.glob(".tmp-*"))
