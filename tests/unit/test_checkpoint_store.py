"""The checkpoint store: one checkpoint, old or new, never in between."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from keyshard.core.position.checkpoint import Checkpoint
from keyshard.errors import CheckpointError, CheckpointInUseError, ConfigError
from keyshard.handlers.checkpoint_store import CheckpointStore

ONE, TWO = Checkpoint("local", "one", 4, {}), Checkpoint("local", "two, ü", 4, {})


@pytest.mark.parametrize("scheme", ["file://", "memory:/", ""])
def test_the_newest_checkpoint_is_loaded(tmp_path: Path, scheme: str) -> None:
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
def test_a_place_that_cannot_be_written_is_named_at_the_start(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CheckpointError, match=r"orders\.json cannot be written"):
        CheckpointStore(f"{tmp_path}/{place}").open()


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


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "orders.json").mkdir()
    with pytest.raises(CheckpointError, match=r"orders\.json"):
        CheckpointStore(f"file://{tmp_path}/orders.json").load()


def test_a_file_that_holds_something_else_is_named(tmp_path: Path) -> None:
    (tmp_path / "orders.json").write_text("a shopping list")
    with pytest.raises(CheckpointError, match=r"orders\.json.*not JSON.*another file"):
        CheckpointStore(f"file://{tmp_path}/orders.json").load()


@pytest.mark.parametrize("url", ["nosuch://bucket/key", "file:///", "file:///var/lib/"])
def test_a_url_of_no_file_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="checkpoint is"):
        CheckpointStore(url)
