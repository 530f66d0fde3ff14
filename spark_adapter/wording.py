"""Errors in the words of Spark's options, as the last line that Spark shows of them."""

from __future__ import annotations

import re
from contextlib import ContextDecorator
from types import TracebackType

from keyshard.errors import KeyShardError
from spark_adapter.option_table import CLIENT, CONNECTION_OPTIONS, OPTIONS

_NAMES = {option.field: option.name for option in reversed(OPTIONS) if "_" in option.field} | {
    option.field: CLIENT + option.name for option in CONNECTION_OPTIONS if "_" in option.field
}
_FIELD = re.compile(rf"\b({'|'.join(_NAMES)})\b")


class told_in_short(ContextDecorator):  # noqa: N801 - used as a function is
    """Errors of keyshard without causes and inner frames.

    Spark prints the traceback of every cause before the error, whose sentence says what they said.
    """

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        if isinstance(error, KeyShardError):
            raise self.told(error).with_traceback(None) from None

    def told(self, error: KeyShardError) -> KeyShardError:
        """The error to raise in place of another."""
        return error


class told_to_spark(told_in_short):  # noqa: N801
    """The same, and errors name options, not fields of ``KeyShardSource``.

    Args:
        **first: What the user calls things whose names are words; they may be an error's first.
    """

    def __init__(self, **first: str) -> None:
        self._first = first

    def told(self, error: KeyShardError) -> KeyShardError:
        text = _FIELD.sub(lambda found: _NAMES[found[1]], error.message)
        word, space, rest = text.partition(" ")
        text = self._first.get(word, word) + space + rest
        return type(error)(text, **error.facts)
