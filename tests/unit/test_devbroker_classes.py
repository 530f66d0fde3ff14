"""The archive of the loaded classes: made once for each Java; a broker starts without it, too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from keyshard.errors import DevBrokerError
from keyshard.testing.devbroker.java import class_options

Homes = tuple[Path, Path]


@pytest.fixture
def homes(tmp_path: Path) -> Homes:
    home, java = tmp_path / "pulsar" / "4.0.8", tmp_path / "java"
    home.mkdir(parents=True)
    java.mkdir()
    return home, java


def java_of(java: Path, script: str) -> None:
    """Make a Java of a shell script."""
    launcher = java / "bin" / "java"
    launcher.parent.mkdir()
    launcher.write_text(f"#!/bin/sh\n{script}\n")
    launcher.chmod(0o755)


def archive_of(options: Sequence[str]) -> Path:
    """The file that a JVM with these options writes."""
    return Path(options[-1].partition("-XX:ArchiveClassesAtExit=")[2])


def test_it_is_made_once_for_each_java(homes: Homes) -> None:
    home, java = homes
    made: list[Path] = []

    def record(options: Sequence[str]) -> None:
        made.append(archive_of(options))
        made[-1].write_text("classes")

    first = class_options(home, java, record)
    (option,) = first
    name, _, file = option.partition("=")
    assert name == "-XX:SharedArchiveFile"
    assert Path(file).read_text() == "classes"
    assert class_options(home, java, record) == first
    (java / "release").write_text('JAVA_VERSION="21.0.1"')
    assert class_options(home, java, record) not in ([], first)
    assert len(made) == 2
    assert not any(file.exists() for file in made), "it has its name only when it is whole"


def test_a_java_without_an_archive_of_its_own_classes_gets_one(homes: Homes) -> None:
    """Pulsar 5.0 needed 17 to 40 s to start with the Java of the wheel."""
    home, java = homes
    java_of(java, 'case "$1" in -Xshare:dump) : > "${2#*=}" ;; *) exit 1 ;; esac')
    given: list[Sequence[str]] = []

    def record(options: Sequence[str]) -> None:
        given.append(options)
        archive_of(options).write_text("classes")

    (option,) = class_options(home, java, record)
    own, _, archive = option.partition("=")[2].partition(":")
    assert given[0][0] == f"-XX:SharedArchiveFile={own}"
    assert Path(archive).read_text() == "classes"
    assert class_options(home, java, record) == [option]
    assert len(given) == 1


def test_a_java_with_an_archive_of_its_own_classes_keeps_it(homes: Homes) -> None:
    home, java = homes
    java_of(java, "exit 0")
    given: list[Sequence[str]] = []
    class_options(home, java, given.append)
    assert [len(options) for options in given] == [1]


def test_a_java_that_makes_none_is_not_asked_again(homes: Homes) -> None:
    asked: list[Sequence[str]] = []
    for _ in range(2):
        assert class_options(*homes, asked.append) == []
    assert len(asked) == 1


def test_a_broker_that_did_not_start_leaves_nothing_behind(homes: Homes) -> None:
    def fails(options: Sequence[str]) -> None:
        archive_of(options).write_text("half of the classes")
        raise DevBrokerError("it did not start")

    assert class_options(*homes, fails) == []

    def works(options: Sequence[str]) -> None:
        archive_of(options).write_text("classes")

    (option,) = class_options(*homes, works)
    assert Path(option.partition("=")[2]).read_text() == "classes"


def test_a_cache_that_cannot_be_written_is_no_fault(homes: Homes) -> None:
    home, java = homes
    (home.parent / "file").touch()
    assert class_options(home.parent / "file" / "4.0.8", java, lambda _options: None) == []
