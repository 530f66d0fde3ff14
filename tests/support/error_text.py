"""The form of an error as people see it."""

from __future__ import annotations

import re

_FORM = re.compile(
    r"(?:keyshard\.errors\.\w+: )?\[(KEYSHARD_[A-Z_]+)\] [^\n]+\n"
    r"(?:Place: [^\n]+\n)?"
    r"Remedy: [^\n]+\n"
    r"More: docs/errors\.md#(\w+), or run: keyshard error (KEYSHARD_[A-Z_]+)\n?"
)


def has_error_form(text: str) -> bool:
    """Whether a text is one error: lines for the cause, the place, the remedy and the page."""
    found = _FORM.fullmatch(text)
    return found is not None and found[1] == found[3] and found[2] == found[1].lower()
