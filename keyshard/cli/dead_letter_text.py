"""Texts of ``keyshard dead-letters``: tables, plans and values."""

# ruff: noqa: PLC0415 - each command imports its modules when it runs, so that --help is fast.
from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from keyshard.cli.output import age, console, plain, plural
from keyshard.errors import ConfigError

if TYPE_CHECKING:
    from keyshard.observe.dead_letter_requests import ListedDeadLetter, ShownDeadLetter

HEX_WIDTH = 16
"""Bytes in a line of hex."""
PLAN_KEYS = 20
"""Most keys of a plan that are printed."""
REASON_CHARS = 60
"""Most characters of an error in the table."""


def row_of(one: ListedDeadLetter) -> list[str]:
    """Return the cells of a dead letter in :func:`print_table`."""
    size = one["bytes"]
    return [
        plain(one["topic"].removeprefix("persistent://public/default/")),
        str(one["partition"]),
        plain(one["messageId"]),
        "-" if one["key"] is None else plain(one["key"]),
        plain(one["error"]),
        str(one["attempts"]),
        age(one["ageSeconds"]),
        "in parts" if size is None else f"{size:,}",
        plain(one["reason"], REASON_CHARS),
    ]


def print_table(rows: list[list[str]]) -> None:
    """Print a list of dead letters."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in (
        ("topic", "left"), ("part.", "right"), ("message id", "left"), ("key", "left"),
        ("error", "left"), ("att.", "right"), ("age", "right"), ("size", "right"),
        ("reason", "left"),
    ):  # fmt: skip
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*map(escape, row))
    console().print(table)


def plan_text(plan: dict[str, Any], sentence: str) -> str:
    """Return what a command would do: the counts, and the first keys."""
    lines = [f"{sentence}. {plural(plan['matching'], 'dead letter')} match. Nothing was done."]
    for one in plan["first"][:PLAN_KEYS]:
        count = plural(one["deadLetters"], "dead letter")
        lines.append(f"  {plain(repr(one['key']))}: {count}, {one['matching']:,} match")
    if plan["keys"] > PLAN_KEYS:
        lines.append(f"  and {plural(plan['keys'] - PLAN_KEYS, 'more key')}")
    return "\n".join(lines)


def shown_text(found: ShownDeadLetter) -> tuple[str, bytes | None]:
    """Return a dead letter as text that ends before its value, and the value."""
    lines = [
        f"kind        {found['kind']}",
        f"topic       {found['topic']}, partition {found['partition']}",
        f"message id  {found['messageId']}",
        f"key         {found['key']!r}",
        f"attempts    {found['attempts']}",
        f"error       {plain(found['error'])}",
        f"reason      {plain(found['reason'], 1_000)}",
        f"published   {found['publishTime']}",
        f"event time  {found['eventTime'] or '-'}",
        f"written     {found['writtenAt']} ({age(found['ageSeconds'])} ago)",
    ]
    properties = found["properties"].items()
    lines += [f"property    {plain(name)} = {plain(value)}" for name, value in properties]
    if found["value"] is None:
        return "\n".join([*lines, "value       null"]), None
    value = b64decode(found["value"])
    size = f"{found['bytes']:,} bytes"
    if found["bytes"] != len(value):
        size += f", the first {len(value):,}"
    return "\n".join([*lines, f"value       {size}:"]), value


def _as_text(value: bytes) -> str:
    return _printable(value.decode(errors="backslashreplace"))


def _printable(text: str) -> str:
    return "".join(one if one.isprintable() or one in "\n\t" else "?" for one in text)


def _as_json(value: bytes) -> str:
    try:
        return json.dumps(json.loads(value), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(
            f"The value is not JSON: {plain(str(exc))}.", "Use --format text or hex."
        ) from exc


def _as_hex(value: bytes) -> str:
    lines = []
    for at in range(0, len(value), HEX_WIDTH):
        part = value[at : at + HEX_WIDTH]
        text = "".join(chr(one) if 32 <= one < 127 else "." for one in part)
        lines.append(f"{at:08x}  {part.hex(' '):<{3 * HEX_WIDTH}} {text}")
    return "\n".join(lines)


def decoded_text(found: ShownDeadLetter) -> str:
    """Return a value that was decoded by its schema, or the reason why it was not."""
    decoded = found["decoded"]
    if decoded is None:
        raise ValueError("the value is not decoded")
    lines = []
    if decoded["text"] is not None:
        lines.append(f"schema      {plain(str(decoded['type']))}, version {decoded['version']}:")
        lines.append(_printable(decoded["text"]))
    if decoded["problem"] is not None:
        lines.append(f"({plain(decoded['problem'], 1_000)})")
    return "\n".join(lines)


FORMATS: dict[str, Callable[[bytes], str]] = {
    "text": _as_text, "json": _as_json, "hex": _as_hex,
}  # fmt: skip
"""Forms of a value; each raises ``ConfigError`` if the value does not have it."""
SCHEMA = "schema"
"""The form that needs the cluster: see :func:`decoded_text`."""
