"""Errors in the words of Spark's options, as the last line that Spark shows of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from keyshard.errors import KeyShardError
from spark_adapter.option_table import CLIENT, CONNECTION_OPTIONS, OPTIONS

_NAMES = {option.field: option.name for option in reversed(OPTIONS) if "_" in option.field} | {
    option.field: CLIENT + option.name for option in CONNECTION_OPTIONS if "_" in option.field
}
_FIELD = re.compile(rf"\b({'|'.join(_NAMES)})\b")


@contextmanager
def told_to_spark(**first: str) -> Iterator[None]:
    """Errors of keyshard name options, not fields of ``KeyShardSource``, and no causes.

    Spark prints the traceback of every cause before the error, whose sentence says what they said.

    Args:
        **first: What the user calls things whose names are words; they may be an error's first.
    """
    try:
        yield
    except KeyShardError as exc:
        text = _FIELD.sub(lambda found: _NAMES[found[1]], exc.message)
        word, space, rest = text.partition(" ")
        text = first.get(word, word) + space + rest
        raise type(exc)(text, **exc.facts) from None
