"""The archive of the classes that a broker loads: made once for each Java, and not needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from keyshard.errors import DevBrokerError
from keyshard.testing.devbroker.java import class_archive


@pytest.fixture
def homes(tmp_path: Path) -> tuple[Path, Path]:
    home, java = tmp_path / "pulsar" / "4.0.8", tmp_path / "java"
    home.mkdir(parents=True)
    java.mkdir()
    return home, java


def test_it_is_made_once_for_each_java(homes: tuple[Path, Path]) -> None:
    home, java = homes
    made: list[Path] = []

    def record(file: Path) -> None:
        made.append(file)
        file.write_text("classes")

    first = class_archive(home, java, record)
    assert first is not None
    assert first.read_text() == "classes"
    assert class_archive(home, java, record) == first
    (java / "release").write_text('JAVA_VERSION="21.0.1"')
    second = class_archive(home, java, record)
    assert second not in {None, first}
    assert len(made) == 2
    assert not any(file.exists() for file in made), "it has its name only when it is whole"


def test_a_java_that_makes_none_is_not_asked_again(homes: tuple[Path, Path]) -> None:
    asked: list[Path] = []
    for _ in range(2):
        assert class_archive(*homes, asked.append) is None
    assert len(asked) == 1


def test_a_broker_that_did_not_start_leaves_nothing_behind(homes: tuple[Path, Path]) -> None:
    def fails(file: Path) -> None:
        file.write_text("half of the classes")
        raise DevBrokerError("it did not start")

    assert class_archive(*homes, fails) is None

    def works(file: Path) -> None:
        file.write_text("classes")

    whole = class_archive(*homes, works)
    assert whole is not None
    assert whole.read_text() == "classes"


def test_a_cache_that_cannot_be_written_is_no_fault(homes: tuple[Path, Path]) -> None:
    home, java = homes
    (home.parent / "file").touch()
    assert class_archive(home.parent / "file" / "4.0.8", java, lambda _file: None) is None
