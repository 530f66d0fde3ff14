"""The form of every error: problem, place, remedy and page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, TypeVar

from keyshard.redaction import redacted, sentence

AGAIN = "keyshard tries again."
"""Remedy of errors that pass without an action."""
IGNORE = "Ignore this error."
"""Remedy of errors that only a stop causes."""
UNREACHABLE = "Check service_url, and check that the broker is running."
"""Remedy if no broker answers."""
_Error = TypeVar("_Error", bound="KeyShardError")


class KeyShardError(Exception):
    """Root of every keyshard error.

    The text of an error has a line for each part::

        [KEYSHARD_STOPPED] The source is stopped.
        Place: source of persistent://public/default/orders, subscription 'billing'
        Remedy: Start the source again. During a stop, ignore this error.
        More: docs/errors.md#keyshard_stopped, or run: keyshard error KEYSHARD_STOPPED

    Secrets are redacted, and the middle of a very long text is left out.

    Args:
        problem: The problem and its subject, in whole sentences, without the code.
        remedy: Sentences that say how to correct it. Default: the remedy of the class in
            :mod:`keyshard.error_reference`.
        **facts: Values for programs, stored as :attr:`facts`. Secrets are redacted.

    Attributes:
        place: The source, sink, query or command that failed. Default: empty, without a line.
    """

    code: ClassVar[str] = "KEYSHARD_ERROR"
    retriable: ClassVar[bool] = False
    __module__ = "keyshard.errors"

    def __init__(self, problem: str, remedy: str = "", **facts: object) -> None:
        self.problem = sentence(problem)
        self.remedy = sentence(remedy)
        self.place = ""
        super().__init__(self.summary)
        self.facts = {
            name: redacted(fact) if isinstance(fact, str) else fact for name, fact in facts.items()
        }

    @property
    def message(self) -> str:
        """The problem and the remedy in one line, without the code."""
        return f"{self.problem} {self.remedy}".rstrip()

    @property
    def summary(self) -> str:
        """The code, the problem and the remedy in one line, as logs have it."""
        return f"[{self.code}] {self.message}"

    @property
    def shown_remedy(self) -> str:
        """The remedy, by default that of the class."""
        from keyshard.error_reference import remedy_of  # noqa: PLC0415 - it imports this module

        return self.remedy or remedy_of(type(self))

    def __str__(self) -> str:
        place = [f"Place: {self.place}"] if self.place else []
        page = f"docs/errors.md#{self.code.lower()}"
        more = f"More: {page}, or run: keyshard error {self.code}"
        return "\n".join(
            [f"[{self.code}] {self.problem}", *place, f"Remedy: {self.shown_remedy}", more]
        )

    def with_text(self: _Error, problem: str, remedy: str) -> _Error:
        """Return the same error with another problem and remedy."""
        return _rebuild(type(self), problem, remedy, self.facts, self.place)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.problem, self.remedy, self.facts, self.place)


def _rebuild(
    kind: type[_Error], problem: str, remedy: str, facts: dict[str, object], place: str
) -> _Error:
    made = kind(problem, remedy, **facts)
    made.place = place
    return made


@contextmanager
def placed(place: str) -> Iterator[None]:
    """Set :attr:`KeyShardError.place` of an error of the block, unless the error has a place."""
    try:
        yield
    except KeyShardError as exc:
        exc.place = exc.place or place
        raise


def one_line(error: object) -> str:
    """Return the text of an object for a log: the ``summary`` of a keyshard error, else ``str``."""
    return error.summary if isinstance(error, KeyShardError) else str(error)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or all of an error of keyshard in one line.

    gRPC adds a long debug context, which is left out.
    """
    return one_line(error).split("\n", 1)[0].split(". gRPC client debug context:", 1)[0]
