"""The checkpoint store: one checkpoint, old or new, never in between."""

from __future__ import annotations

from pathlib import Path

import pytest

from keyshard.core.checkpoint import Checkpoint
from keyshard.errors import CheckpointError, ConfigError
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
