"""The build of sdist and wheel refuses those that do not work."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from keyshard.broker.wire import native_decoder
from tests.support.build_hooks import ROOT, build_script
from tests.support.deadlines import deadline


def smoke_test(script: Path, decoder: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(script), decoder],
        cwd=script.parent, capture_output=True, text=True, timeout=deadline(120), check=False,
    )  # fmt: skip


def test_the_smoke_test_passes_with_the_decoder_of_the_install_only(tmp_path: Path) -> None:
    script = Path(shutil.copy(ROOT / "packaging" / "smoke_test.py", tmp_path))
    has, lacks = ("compiled", "python") if native_decoder.is_available() else ("python", "compiled")
    passed = smoke_test(script, has)
    assert passed.returncode == 0, passed.stderr
    assert "works." in passed.stdout
    failed = smoke_test(script, lacks)
    assert failed.returncode == 1
    assert f"AssertionError: entries are decoded by {has} code" in failed.stderr


def test_a_wheel_that_lacks_compiled_code_is_refused_with_the_reason(tmp_path: Path) -> None:
    script = build_script("make_distributions")
    wheel = tmp_path / "keyshard.whl"
    with ZipFile(wheel, "w") as archive:
        archive.writestr("keyshard/__init__.py", "")
    script._check_compiled(wheel)
    reason = native_decoder.REASON.relative_to(ROOT).as_posix()
    with ZipFile(wheel, "a") as archive:
        archive.writestr(reason, "the build found no rustc\n")
    with pytest.raises(SystemExit, match=r"lacks compiled code, because the build found no rustc"):
        script._check_compiled(wheel)
