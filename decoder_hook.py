"""Builds the compiled decoder of entries where there is a Rust compiler, else leaves it out."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_FOLDER = Path("keyshard", "broker", "wire", "native")


class DecoderHook(BuildHookInterface):
    """Compiles ``decoder.rs`` into a library beside it, which the wheel then carries."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Compile; whatever goes wrong, the package is built without it."""
        compiler = shutil.which("rustc")
        folder = Path(self.root) / _FOLDER
        library = folder / "_decoder.so"
        library.unlink(missing_ok=True)
        if compiler is None:
            self.app.display_info("No rustc: entries are decoded in Python, which is slower.")
            return
        command = [
            compiler, "--edition", "2021", "-O", "-C", "strip=symbols", "--crate-type", "cdylib",
            "-o", str(library), str(folder / "decoder.rs"),
        ]  # fmt: skip
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        except (OSError, subprocess.SubprocessError) as exc:
            said = getattr(exc, "stderr", "") or exc
            self.app.display_warning(f"The decoder was not compiled, Python's is used: {said}")
            return
        build_data["artifacts"].append(f"/{_FOLDER.as_posix()}/_decoder.so")
        build_data["pure_python"] = False
        machine = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{machine}"
