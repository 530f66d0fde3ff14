"""A mutant: keyshard with one broken promise, and the tests that must fail."""

from __future__ import annotations

from dataclasses import dataclass


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
