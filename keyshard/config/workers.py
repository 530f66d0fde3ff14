"""What has the consumers of a source: the option ``workers``.

``embedded``, ``processes:4``, or the name of another place with a number and options of its own:
``ray:4?num_cpus=0.5``. A package adds a place by an entry point of the group ``keyshard.workers``:
its name, and a :data:`keyshard.broker.hosted.places.Place`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from urllib.parse import parse_qsl

from keyshard.core.option_checks import check_integer, check_text
from keyshard.errors import ConfigError
from keyshard.redaction import shown

EMBEDDED = "embedded"
"""Ranges are consumed by the process that runs the source."""
PROCESSES = "processes"
"""The place that keyshard has itself: processes of this machine."""
GROUP = "keyshard.workers"
"""Entry points of other places."""
WORKERS_MAX = 256
"""Most workers of one source."""
_FORM = re.compile(r"([a-z][a-z0-9_-]*):([0-9]{1,9})(?:\?(.+))?")


@dataclass(frozen=True, slots=True)
class Workers:
    """How many workers are wanted, and where."""

    text: str
    """As it was given."""
    place: str
    count: int
    options: Mapping[str, str]
    """What the place reads; each name once."""

    @classmethod
    def parse(cls, text: object) -> Workers | None:
        """What a text means; ``None`` is ``embedded``.

        Raises:
            ConfigError: It means nothing, there is no such place, or the number is out of bounds.
        """
        if isinstance(text, int):
            raise ConfigError(
                f"workers is {shown(text)}; it is what has the consumers: write 'embedded', or "
                "'processes:4'. How many handlers run at the same time is workers of run()."
            )
        given = check_text("workers", text, "write 'embedded', or 'processes:4'")
        if given == EMBEDDED:
            return None
        found = _FORM.fullmatch(given)
        if found is None or (found[1] != PROCESSES and found[1] not in places()):
            raise ConfigError(f"workers is {shown(text)}; {_forms()}.")
        check_integer("workers", int(found[2]), 1, WORKERS_MAX)
        try:
            pairs = parse_qsl(found[3] or "", keep_blank_values=True, strict_parsing=bool(found[3]))
        except ValueError as exc:
            raise ConfigError(
                f"workers is {shown(text)}; write options as 'name=value&name=value' after the '?'."
            ) from exc
        options = dict(pairs)
        if len(options) < len(pairs):
            raise ConfigError(f"workers is {shown(text)}, which has an option twice.")
        if options and found[1] == PROCESSES:
            raise ConfigError(f"workers is {shown(text)}; {PROCESSES!r} takes no options.")
        return cls(given, found[1], int(found[2]), options)


def places() -> dict[str, EntryPoint]:
    """The places that installed packages add, by their names."""
    return {one.name: one for one in entry_points(group=GROUP)}


def _forms() -> str:
    all_places = ", ".join(repr(f"{name}:4") for name in (PROCESSES, *sorted(places())))
    return f"write 'embedded', or how many workers and where: {all_places}"
