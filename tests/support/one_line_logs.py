"""Logs have the one line of an error: an error object among the arguments of a record fails."""

from __future__ import annotations

import logging
from typing import Any

from keyshard.errors import KeyShardError

_make = logging.getLogRecordFactory()


def _checked(*args: Any, **kwargs: Any) -> logging.LogRecord:
    record = _make(*args, **kwargs)
    given = record.args if isinstance(record.args, tuple) else ()
    several = [arg for arg in given if isinstance(arg, KeyShardError)]
    assert not several, (
        f"{record.name}, line {record.lineno}: log error.summary, not {several[0]!r}"
    )
    return record


def install() -> None:
    """Check the records of all loggers of this process."""
    logging.setLogRecordFactory(_checked)
