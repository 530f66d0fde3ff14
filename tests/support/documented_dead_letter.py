"""The properties of dead letters, as the documentation names them and as sources write them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from keyshard.core.dead_letter import OLDEST, PREFIX, DeadLetter, parse
from keyshard.core.message import Message
from tests.support.deadlines import ROOT

SOMETIMES = {"keyshard.schemaVersion", "keyshard.keyBytes", "keyshard.parts", "keyshard.head"}
"""Properties that, by the table, only some dead letters have."""


def documented() -> set[str]:
    """Return the names in the first column of the table."""
    text = (ROOT / "docs/how-to/poison-messages.md").read_text()
    section = text.partition("## Contents of a dead letter")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    named = set(re.findall(r"`(keyshard\.[A-Za-z]+)`", "".join(one.split("|")[1] for one in rows)))
    assert f"`{OLDEST}`" in section, "its own property is named below the table"
    assert OLDEST not in named
    return named


def written(stored: Iterable[Message]) -> list[set[str]]:
    """Return the names of keyshard's properties in each dead letter, without the source's own."""
    return [
        {name for name in one.properties if name.startswith(PREFIX)} - {OLDEST}
        for one in stored
        if isinstance(parse(one), DeadLetter)
    ]
