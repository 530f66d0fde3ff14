"""The checkpoint store: one checkpoint, old or new, never in between."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from keyshard.core.position.checkpoint import Checkpoint
from keyshard.errors import CheckpointError, CheckpointInUseError, ConfigError
from keyshard.handlers.checkpoint_store import CheckpointStore
from tests.support.deadlines import deadline

ONE, TWO = Checkpoint("local", "one", 4, {}), Checkpoint("local", "two, ü", 4, {})


@pytest.mark.parametrize("scheme", ["file://", "memory:/", ""])
def test_the_newest_checkpoint_is_loaded(tmp_path: Path, scheme: str) -> None:
    (tmp_path / "state").mkdir()
    store = CheckpointStore(f"{scheme}{tmp_path}/state/orders.json")
    assert store.load() is None
    store.save(ONE)
    store.save(TWO)
    assert CheckpointStore(f"{scheme}{tmp_path}/state/orders.json").load() == TWO


def test_a_write_that_fails_leaves_the_old_one_and_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "orders.json"
    store = CheckpointStore(f"file://{path}")
    store.save(ONE)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CheckpointError, match=r"No space left.*acknowledged"):
        store.save(TWO)
    assert store.load() == ONE
    assert list(tmp_path.iterdir()) == [path]


HOLDER = """
import sys, time
from keyshard.handlers.checkpoint_store import CheckpointStore
store = CheckpointStore(sys.argv[1])
store.open()
print("open", flush=True)
time.sleep(60)
"""


def test_a_file_has_one_source_at_a_time_and_a_crashed_one_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    url = f"file://{tmp_path}/state/orders.json"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, url], stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        store = CheckpointStore(url)
        with pytest.raises(CheckpointInUseError, match=rf"orders\.json .*process {holder.pid}\."):
            store.open()
        holder.kill()
    assert store.open() is None
    with pytest.raises(CheckpointInUseError, match="this process"):
        CheckpointStore(url).open()
    other = CheckpointStore(f"file://{tmp_path}/state/others.json")
    assert other.open() is None
    other.close()
    store.save(ONE)
    store.close()
    again = CheckpointStore(url)
    assert again.open() == ONE
    again.close()


def test_a_link_stays_and_the_checkpoint_goes_where_it_leads(tmp_path: Path) -> None:
    """The first checkpoint replaced a link by a file of the container's own disk."""
    durable = tmp_path / "durable"
    durable.mkdir()
    (tmp_path / "linked").symlink_to("durable")
    (tmp_path / "chain.json").symlink_to(tmp_path / "linked" / "orders.json")
    link = tmp_path / "app.json"
    link.symlink_to("chain.json")
    for checkpoint in (ONE, TWO):
        store = CheckpointStore(link)
        store.open()
        store.save(checkpoint)
        store.close()
    assert link.is_symlink()
    assert (durable / "orders.json").read_text() == TWO.to_json()
    assert {path.name for path in durable.iterdir()} == {"orders.json", "orders.json.lock"}


@pytest.mark.parametrize("elsewhere", [False, True], ids=["this process", "another"])
@pytest.mark.parametrize(
    "alias", ["link.json", "folder/orders.json", "./state/../state/orders.json", "hard link"]
)
def test_a_checkpoint_file_has_one_source_over_all_its_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alias: str, elsewhere: bool
) -> None:
    """The lock file of a link was named after the link, not after its target."""
    state = tmp_path / "state"
    state.mkdir()
    (tmp_path / "link.json").symlink_to(state / "orders.json")
    (tmp_path / "folder").symlink_to("state")
    monkeypatch.chdir(tmp_path)
    store = CheckpointStore(state / "orders.json")
    store.open()
    if alias == "hard link":  # Another mount of the folder shows the same lock file.
        (tmp_path / "mount").mkdir()
        (tmp_path / "mount" / "orders.json.lock").hardlink_to(state / "orders.json.lock")
        alias = "mount/orders.json"
    if elsewhere:
        other = subprocess.run(
            [sys.executable, "-c", HOLDER, alias],
            capture_output=True,
            text=True,
            check=False,
            timeout=deadline(20),
        )
        assert "KEYSHARD_CHECKPOINT_IN_USE" in other.stderr
    else:
        for _ in range(2):
            with pytest.raises(CheckpointInUseError, match="this process"):
                CheckpointStore(alias).open()
    store.close()
    again = CheckpointStore(alias)
    again.open()
    again.close()


def test_a_folder_that_is_missing_is_named_and_not_made(tmp_path: Path) -> None:
    """The checkpoint of an unmounted volume was written below its mount point."""
    (tmp_path / "app.json").symlink_to(tmp_path / "volume" / "orders.json")
    for path in (tmp_path / "volume" / "orders.json", tmp_path / "app.json"):
        with pytest.raises(CheckpointError, match=r"the folder .*/volume does not exist"):
            CheckpointStore(path).open()
    assert not (tmp_path / "volume").exists()
    (tmp_path / "volume").mkdir()
    store = CheckpointStore(tmp_path / "app.json")
    store.open()
    store.save(ONE)
    for path in (tmp_path / "volume").iterdir():
        path.unlink()
    (tmp_path / "volume").rmdir()
    with pytest.raises(CheckpointError, match="cannot be stored"):
        store.save(TWO)
    assert not (tmp_path / "volume").exists()
    store.close()


def test_only_a_regular_file_is_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    with pytest.raises(CheckpointError, match="it is not a file"):
        CheckpointStore(pipe).open()


def test_a_checkpoint_that_cannot_be_read_is_not_held(tmp_path: Path) -> None:
    path = tmp_path / "orders.json"
    path.write_text("a shopping list")
    with pytest.raises(CheckpointError, match="not JSON"):
        CheckpointStore(f"{path}").open()
    path.unlink()
    store = CheckpointStore(f"{path}")
    assert store.open() is None
    store.close()


@pytest.mark.parametrize("place", ["file/orders.json", "file/deeper/orders.json"])
def test_an_unwritable_location_is_named_at_the_start(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CheckpointError, match=r"orders\.json cannot be written"):
        CheckpointStore(f"{tmp_path}/{place}").open()


@pytest.mark.parametrize("place", ["{}.json", "{}/orders.json"])
def test_a_name_that_is_too_long_is_named_at_the_start(tmp_path: Path, place: str) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be written: .*too long"):
        CheckpointStore(tmp_path / place.format("a" * 300)).open()


@pytest.mark.parametrize("length", range(240, 256))
def test_an_opened_checkpoint_can_be_saved(tmp_path: Path, length: int) -> None:
    store = CheckpointStore(tmp_path / ("a" * length))
    try:
        store.open()
    except CheckpointError:
        return
    store.save(ONE)
    store.close()


def test_a_crashed_writer_leaves_nothing_behind_for_ever(tmp_path: Path) -> None:
    """Each crash within a write left one more file, under the name of its process."""
    path = tmp_path / "orders.json"
    for _ in range(2):
        program = (
            "import os, sys\n"
            "from keyshard.core.position.checkpoint import Checkpoint\n"
            "from keyshard.handlers.checkpoint_store import CheckpointStore\n"
            "store = CheckpointStore(sys.argv[1])\n"
            "store.open()\n"
            "os.fsync = lambda _: os._exit(0)\n"
            "store.save(Checkpoint('local', 'one', 4, {}))\n"
        )
        subprocess.run([sys.executable, "-c", program, path], check=True, timeout=deadline(20))
    store = CheckpointStore(path)
    assert store.open() is None
    store.save(ONE)
    store.close()
    assert {file.name for file in tmp_path.iterdir()} == {path.name, f"{path.name}.lock"}


class _Refusing(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """A store with the URL in its errors."""

    protocol = "refusing"

    def pipe_file(self, path: str, *_: object) -> None:
        raise OSError(5, "refused", path)

    cat_file = pipe_file

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path


class _Tearing(MemoryFileSystem):  # type: ignore[misc]
    """A store such as SFTP, whose connection may end in the middle of a write."""

    protocol = "tearing"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    left = 0
    """Operations until the connection ends."""

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        whole = self._go_on()
        super().pipe_file(path, value if whole else value[: len(value) // 2])
        if not whole:
            raise OSError("the connection ended")

    def rm_file(self, path: str) -> None:
        if not self._go_on():
            raise OSError("the connection ended")
        super().rm_file(path)

    def _go_on(self) -> bool:
        type(self).left -= 1
        return self.left >= 0


@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("second", range(4))
@pytest.mark.parametrize("restarts", [True, False])
def test_a_store_without_atomic_writes_keeps_a_whole_checkpoint(
    first: int, second: int, restarts: bool, tmp_path: Path
) -> None:
    """The connection ends twice, after any number of operations; the process may end as well."""
    fsspec.register_implementation("tearing", _Tearing, clobber=True)
    url = f"tearing://{tmp_path}/orders.json"
    store = CheckpointStore(url)
    _Tearing.left = 100
    store.save(ONE)
    durable, possible = ONE, [ONE]
    for number, left in enumerate((first, second)):
        _Tearing.left = left
        new = Checkpoint("local", f"number {number}", 4, {})
        possible.append(new)
        with suppress(CheckpointError):
            store.save(new)
            durable = new
        _Tearing.left = 100
        store = CheckpointStore(url) if restarts else store
        found = CheckpointStore(url).load()
        assert found is not None
        assert found in possible[possible.index(durable) :]
        if restarts:
            assert store.load() == found
    store.save(TWO)
    assert CheckpointStore(url).load() == TWO
    assert not [name for name in _Tearing.store if name.endswith(".new") and str(tmp_path) in name]


@pytest.mark.parametrize("what", ["open", "load", "save"])
def test_no_traceback_shows_the_password_of_a_store(what: str) -> None:
    fsspec.register_implementation("refusing", _Refusing, clobber=True)
    store = CheckpointStore("refusing://ann:geheim@host/orders.json")
    with pytest.raises(CheckpointError) as caught:
        getattr(store, what)(*([ONE] if what == "save" else []))
    output = "".join(traceback.format_exception(caught.value))
    assert "refused" in output
    assert "geheim" not in output


def test_an_object_store_is_tried_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(f"memory://{tmp_path}/orders.json")
    assert store.open() is None
    assert not store._files.find(str(tmp_path)), "nothing is left there"

    def refused(*_: object) -> None:
        raise PermissionError("read only")

    monkeypatch.setattr(store._files, "pipe_file", refused)
    with pytest.raises(CheckpointError, match="cannot be written: read only"):
        store.open()


def test_an_unreadable_value_is_named(tmp_path: Path) -> None:
    (tmp_path / "orders.json").mkdir()
    with pytest.raises(CheckpointError, match=r"orders\.json"):
        CheckpointStore(f"file://{tmp_path}/orders.json").load()


def test_a_file_that_holds_something_else_is_named(tmp_path: Path) -> None:
    (tmp_path / "orders.json").write_text("a shopping list")
    with pytest.raises(CheckpointError, match=r"(?s)orders\.json.*not JSON.*another file"):
        CheckpointStore(f"file://{tmp_path}/orders.json").load()


@pytest.mark.parametrize("url", ["nosuch://bucket/key", "file:///", "file:///var/lib/"])
def test_a_url_of_no_file_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="checkpoint is"):
        CheckpointStore(url)


@pytest.mark.parametrize(
    "url",
    [
        "://user:s3cr3t@a,b", "file://user:s3cr3t@host/x", "local://user:s3cr3t@host", "c://s3cr3t@h",
        "file://user:s3cr3t/more@host/x", "://user:s3//cr3t@a/b",
    ],
)  # fmt: skip
def test_a_local_file_with_a_user_is_refused_without_its_password(url: str) -> None:
    """The path of ``://user:secret@host`` has one slash, so its password was shown in errors."""
    with pytest.raises(ConfigError, match="no host and no user") as caught:
        CheckpointStore(url)
    assert "cr3t" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["file://", ""])
def test_the_path_of_a_local_file_may_have_an_at_sign(tmp_path: Path, scheme: str) -> None:
    store = CheckpointStore(f"{scheme}{tmp_path}/ann@host.json")
    store.save(ONE)
    assert store.load() == ONE


def test_a_checkpoint_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    """Its damaged bytes became other characters of a name."""
    path = tmp_path / "orders.json"
    path.write_bytes(ONE.to_json().encode().replace(b"local", b"loc\xffl"))
    with pytest.raises(CheckpointError, match=r"orders.json cannot be read: .*UTF-8"):
        CheckpointStore(path).load()


@pytest.mark.parametrize("damaged", [b"[" * 100_000, b'{"cluster":"loc\xffl"}'])
def test_damaged_content_of_a_store_without_atomic_writes_counts_as_cut_off(
    damaged: bytes, tmp_path: Path
) -> None:
    """Deep nesting was a RecursionError, and bytes that are no text hid the whole copy."""
    fsspec.register_implementation("tearing", _Tearing, clobber=True)
    _Tearing.left = 100
    store = CheckpointStore(f"tearing://{tmp_path}/orders.json")
    store._files.pipe_file(store._path, damaged)
    with pytest.raises(CheckpointError, match=r"orders.json cannot be read"):
        store.load()
    store._files.pipe_file(store._copy, ONE.to_json().encode())
    assert store.load() == ONE
