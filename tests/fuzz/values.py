"""Unexpected values, drawn from a seed."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

SECRET = "s3cr3t-of-the-user"
"""Secrets that no error, repr or log line may show."""


class Hostile:
    """An object all of whose special methods raise."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    def __hash__(self) -> int:
        raise RuntimeError("no hash")

    def __bool__(self) -> bool:
        raise RuntimeError("no truth")

    def __float__(self) -> float:
        raise RuntimeError("no number")


def value(random: Random) -> Any:
    """One hostile value of any type."""
    kind = random.random()
    if kind < 0.15:
        return text(random)
    if kind < 0.25:
        return url(random)
    return random.choice(_VALUES)


def text(random: Random) -> str:
    """A hostile text that UTF-8 can hold."""
    if random.random() < 0.1:
        return "".join(chr(random.randrange(1, 0xD800)) for _ in range(random.randint(1, 40)))
    return random.choice(_TEXTS)


def url(random: Random) -> str:
    """A URL with a secret in it, of any scheme."""
    scheme = random.choice(
        ("pulsar", "pulsar+ssl", "http", "https", "file", "memory", "s3", "ftp", "nothing", "")
    )
    where = random.choice(("127.0.0.1:1", "", "host", "[::1]:70000", "h:port", "a,b", "h/x?y=z"))
    return f"{scheme}://user:{SECRET}@{where}"


_TEXTS = (
    "", " ", "\0", "a" * 300, "a" * 70_000, "\N{SNOWMAN}\N{PILE OF POO}\xe9\u202e",
    "line\nbreak\r\n\ttab", "[" * 100_000, "{{0}} %s %(x)s {x!r}", "AAAA", "AAAA" * 9, "a2V5LTE=",
    "../../x", "-1", "8", "nan", "true", "keyshard.original",
)  # fmt: skip

_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 10**40, 0.5, -0.0,
    float("nan"), float("inf"), float("-inf"), b"", b"\xff\xfe", "\ud800", Path("x"),
    [], [None], ["a", 1, b"c"], {"a": 1}, (), object(), Hostile(), Hostile, print, 1j, range(3),
    iter(()),
)  # fmt: skip
