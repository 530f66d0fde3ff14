"""A mutant: keyshard with one broken promise, and the tests that must fail."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("keyshard", "spark_adapter", "ray_adapter", "tests", "examples")


@dataclass(frozen=True, slots=True)
class Edit:
    """One change of the source text."""

    file: str
    old: str
    """Stands exactly once in the file."""
    new: str


@dataclass(frozen=True, slots=True)
class Mutant:
    """One way to break a promise."""

    name: str
    promise: str
    """The promise that it breaks."""
    edits: tuple[Edit, ...]
    killers: tuple[str, ...]
    """Tests, each of which must fail; they pass on the code as it is."""


def killer(file: str, *names: str) -> str:
    """A file of tests, or one test in it, as pytest names them."""
    return "::".join([f"tests/{file}.py", *names])


def copy_code(folder: Path) -> None:
    """Copy the packages and their tests into a folder."""
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)


def changed(text: str, edit: Edit) -> str:
    """The text of a file after an edit."""
    times = text.count(edit.old)
    assert times == 1, (
        f"{edit.file} has {times} times, not once:\n{edit.old}\n"
        "The code has changed: bring the mutant up to date."
    )
    return text.replace(edit.old, edit.new)
