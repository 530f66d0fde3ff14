"""Builds the compiled decoder and encoder of entries if there is a Rust compiler that works."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_FOLDER = Path("keyshard", "broker", "wire", "native")
_NAMES = ("decoder", "encoder")
_REASON = "_not_compiled.txt"
"""File that says why a library is missing; :mod:`keyshard.broker.wire.native_decoder` reads it."""
_COMPILE_S = 120
"""Longest time to compile one library, seconds."""
_REASON_LENGTH_MAX = 300


class DecoderHook(BuildHookInterface):
    """Compiles the sources into libraries beside them, which the wheel then carries."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Compile; whatever goes wrong, the package is built without it."""
        folder = Path(self.root) / _FOLDER
        reason = folder / _REASON
        libraries = [folder / f"_{name}.so" for name in _NAMES]
        for at, (name, library) in enumerate(zip(_NAMES, libraries, strict=True)):
            failed = _failure(folder, name, library)
            if failed is not None:
                for stale in (*libraries[at:], _unfinished(library)):
                    stale.unlink(missing_ok=True)
                reason.write_text(failed + "\n", encoding="utf-8")
                build_data["artifacts"].append(f"/{_FOLDER.as_posix()}/{_REASON}")
                self.app.display_warning(
                    f"keyshard: no compiled {name}, Python's slower code is used, because {failed}"
                )
                return
            build_data["artifacts"].append(f"/{_FOLDER.as_posix()}/{library.name}")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{_machine()}"
        reason.unlink(missing_ok=True)


def _failure(folder: Path, name: str, library: Path) -> str | None:
    """Compile a library; return why that failed, on one line, or ``None``.

    An earlier library stays until the new one is complete: programs may start meanwhile.
    """
    compiler = shutil.which("rustc")
    if compiler is None:
        return "the build found no rustc"
    # Relative names: the library says in which file it panics, and no folder of this machine.
    command = [
        compiler, "--edition", "2021", "-O", "-C", "strip=symbols", "--crate-type", "cdylib",
        "-o", _unfinished(library).name, f"{name}.rs",
    ]  # fmt: skip
    try:
        subprocess.run(
            command, check=True, capture_output=True, text=True, errors="replace",
            timeout=_COMPILE_S, cwd=folder,
        )  # fmt: skip
        _unfinished(library).replace(library)
    except subprocess.CalledProcessError as exc:
        lines = [line.strip() for line in str(exc.stderr).splitlines() if line.strip()]
        said = next((line for line in lines if line.startswith("error")), (lines or [str(exc)])[0])
        return f"rustc does not work: {said}"[:_REASON_LENGTH_MAX]
    except subprocess.TimeoutExpired:
        return f"rustc did not end within {_COMPILE_S} s"
    except OSError as exc:
        return f"rustc does not start: {exc.strerror}"
    return None


def _unfinished(library: Path) -> Path:
    return library.with_name(f"{library.name}.new")


def _machine() -> str:
    """Name the platform of the libraries, as wheels do."""
    if sys.platform != "darwin":
        return sysconfig.get_platform().replace("-", "_").replace(".", "_")
    # The platform of the interpreter may name two processors; rustc compiles for one.
    processor = platform.machine()
    oldest = os.environ.get("MACOSX_DEPLOYMENT_TARGET", "11.0" if processor == "arm64" else "10.12")
    major, _, minor = oldest.partition(".")
    # Since macOS 11, wheels name only the major version.
    minor = "0" if int(major) >= 11 else minor or "0"
    return f"macosx_{major}_{minor}_{processor}"
