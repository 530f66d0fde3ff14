"""The build compiles if it can, and says in one line why it could not."""

from __future__ import annotations

import stat
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import pytest

from keyshard.broker.wire import native_decoder, native_encoder
from keyshard.config.connection import Connection
from keyshard.config.source import SourceConfig
from keyshard.errors import BrokerError
from keyshard.observe.doctor import examine
from tests.support.build_hooks import build_hook

NATIVE = "/keyshard/broker/wire/native"
NO_TOOLCHAIN = (
    "echo 'warning: a warning' >&2; "
    "echo 'error: rustup could not choose a version of rustc to run' >&2; "
    "echo \"help: run 'rustup default stable'\" >&2; echo >&2; echo '0: backtrace' >&2; exit 1"
)


class Build:
    """A build in a folder of its own, with a ``rustc`` that is a script, or without one."""

    def __init__(self, hook: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._hook, self._root = hook, root
        self.native = root / NATIVE[1:]
        self.native.mkdir(parents=True)
        self.said: list[str] = []
        # Nothing but this rustc is on the path; a script has the commands of its shell.
        monkeypatch.setenv("PATH", str(root))

    def run(self, rustc: str | None) -> dict[str, Any]:
        if rustc is not None:
            script = self._root / "rustc"
            script.write_text(f"#!/bin/sh\n{rustc}\n")
            script.chmod(script.stat().st_mode | stat.S_IXUSR)
        hook = self._hook.DecoderHook()
        hook.root = str(self._root)
        hook.app = SimpleNamespace(display_warning=self.said.append)
        data: dict[str, Any] = {"artifacts": []}
        hook.initialize("standard", data)
        return data

    @property
    def reason(self) -> str:
        return (self.native / native_decoder.REASON.name).read_text()


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return build_hook(monkeypatch, "decoder_hook")


@pytest.fixture
def build(hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    return Build(hook, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("rustc", "because"),
    [
        (None, "the build found no rustc"),
        (
            NO_TOOLCHAIN,
            "rustc does not work: error: rustup could not choose a version of rustc to run",
        ),
        ("exit 3", "rustc does not work: Command"),
        ("printf 'killed \\377\\n' >&2; exit 1", "rustc does not work: killed \ufffd"),
    ],
)
def test_without_a_compiler_that_works_the_package_is_built_without_compiled_code(
    build: Build, rustc: str | None, because: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stale in (native_decoder.BUILT, native_encoder.BUILT):
        (build.native / stale.name).touch()
    data = build.run(rustc)
    assert data == {"artifacts": [f"{NATIVE}/{native_decoder.REASON.name}"]}
    assert [one.name for one in build.native.iterdir()] == [native_decoder.REASON.name]
    (line,) = build.said
    assert "\n" not in line
    assert f"because {because}" in line
    monkeypatch.setattr(native_decoder, "REASON", build.native / native_decoder.REASON.name)
    assert native_decoder.why_missing().startswith(because)


def test_a_compiler_that_hangs_does_not_hang_the_build(
    build: Build, hook: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook, "_COMPILE_S", 0.05)
    build.run("while :; do :; done")
    assert "because rustc did not end within 0.05 s" in build.said[0]


def test_libraries_are_files_of_a_wheel_for_this_platform(build: Build) -> None:
    (build.native / native_decoder.REASON.name).write_text("an older build\n")
    data = build.run('while [ "$1" != -o ]; do shift; done; echo built > "$2"')
    names = [native_decoder.BUILT.name, native_encoder.BUILT.name]
    assert data["artifacts"] == [f"{NATIVE}/{name}" for name in names]
    assert data["pure_python"] is False
    assert data["tag"].startswith("py3-none-")
    assert "any" not in data["tag"]
    assert sorted(one.name for one in build.native.iterdir()) == names
    assert not build.said


def test_a_library_is_there_while_another_is_built(build: Build) -> None:
    """A program that starts meanwhile, or a test beside it, decodes with compiled code."""
    for older in (native_decoder.BUILT, native_encoder.BUILT):
        (build.native / older.name).write_text("older\n")
    build.run(
        'while [ "$1" != -o ]; do shift; done; read was < ${2%.new}; [ "$was" = older ] || exit 1; '
        'echo built > "$2"'
    )
    assert not build.said
    assert {one.read_text() for one in build.native.glob("*.so")} == {"built\n"}


def test_a_decoder_without_an_encoder_is_kept(build: Build) -> None:
    data = build.run(
        'while [ "$1" != -o ]; do shift; done; [ "$2" = _decoder.so.new ] || exit 1; '
        'echo built > "$2"'
    )
    assert data["artifacts"] == [
        f"{NATIVE}/{name}" for name in (native_decoder.BUILT.name, native_decoder.REASON.name)
    ]
    assert data["tag"] != "py3-none-any"
    assert len(build.said) == 1


@pytest.mark.parametrize(
    ("processor", "target", "tag"),
    [
        ("arm64", None, "macosx_11_0_arm64"),
        ("x86_64", None, "macosx_10_12_x86_64"),
        ("arm64", "13.3", "macosx_13_0_arm64"),
        ("x86_64", "10.15", "macosx_10_15_x86_64"),
    ],
)
def test_a_wheel_for_macos_names_the_processor_that_rustc_compiles_for(
    hook: ModuleType, monkeypatch: pytest.MonkeyPatch, processor: str, target: str | None, tag: str
) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr("platform.machine", lambda: processor)
    monkeypatch.delenv("MACOSX_DEPLOYMENT_TARGET", raising=False)
    if target is not None:
        monkeypatch.setenv("MACOSX_DEPLOYMENT_TARGET", target)
    assert hook._machine() == tag


class _Away:
    """An admin interface that does not answer."""

    def version(self) -> str:
        raise BrokerError("The admin interface does not answer.")


@pytest.mark.parametrize("transport", ["wire", "client"])
@pytest.mark.parametrize("built", [True, False])
def test_the_doctor_names_the_decoder(
    monkeypatch: pytest.MonkeyPatch, transport: Literal["wire", "client"], *, built: bool
) -> None:
    monkeypatch.setattr(native_decoder, "_library", object() if built else None)
    config = SourceConfig("t", subscription="s", connection=Connection(transport=transport))

    def connect() -> Any:
        raise AssertionError

    findings = examine(config, connect, _Away())  # type: ignore[arg-type]
    found = {one.about: one for one in findings}
    if transport == "client":
        assert list(found) == ["transport", "broker"]
        assert found["transport"].level.value == "warning"
        return
    assert found["decoder"].level.value == ("ok" if built else "warning")
    assert found["decoder"].text.startswith(
        "Compiled code" if built else "Entries are decoded in Python, because "
    )
    assert bool(found["decoder"].advice) != built
