"""Errors with option names, in the one line that Spark shows last."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ContextDecorator
from functools import cache
from types import TracebackType

from keyshard.errors import KeyShardError


@cache
def _names() -> tuple[Mapping[str, str], re.Pattern[str]]:
    """Return option names by field, and a pattern that finds the fields; only errors need them."""
    from spark_adapter.options import CLIENT, CONNECTION_OPTIONS, OPTIONS  # noqa: PLC0415

    names = {option.field: option.name for option in reversed(OPTIONS) if "_" in option.field} | {
        option.field: CLIENT + option.name for option in CONNECTION_OPTIONS if "_" in option.field
    }
    return names, re.compile(rf"\b({'|'.join(names)})\b")


class concise_errors(ContextDecorator):  # noqa: N801 - used as a function is
    """Raise errors of keyshard without causes and inner frames.

    Spark prints the traceback of every cause before the error. The error's text already includes
    them.
    """

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        if isinstance(error, KeyShardError):
            raise self.translate(error).with_traceback(None) from None

    def translate(self, error: KeyShardError) -> KeyShardError:
        """Return the error to raise instead."""
        return error


class as_spark_error(concise_errors):  # noqa: N801
    """Also replace fields of ``KeyShardSource`` in the text with option names.

    Args:
        **first: The user's names for arguments that are plain words. They are replaced only where
            an error begins with them; see :func:`renamed`.
    """

    def __init__(self, **first: str) -> None:
        self._first = first

    def translate(self, error: KeyShardError) -> KeyShardError:
        names, field = _names()
        texts = error.problem, error.shown_remedy
        problem, remedy = (field.sub(lambda found: names[found[1]], text) for text in texts)
        return error.with_text(renamed(problem, self._first), remedy)


def renamed(problem: str, names: Mapping[str, str]) -> str:
    """Return a problem with another name of its option. The rest may be text of the user.

    The name is the first word, or the second of ``Option 'name' is ...``.
    """
    word, space, rest = problem.partition(" ")
    if word == "Option":
        quoted, gap, rest = rest.partition(" ")
        own = quoted[1:-1]
        return f"{word} {names[own]!r}{gap}{rest}" if own in names else problem
    return names.get(word, word) + space + rest
