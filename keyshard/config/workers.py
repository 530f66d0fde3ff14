"""The option ``workers``: where the consumers of a source run.

Values are ``embedded``, ``processes:4``, or another backend with a number and its own options:
``ray:4?num_cpus=0.5``. A package adds a backend with an entry point of the group
``keyshard.workers``: its name, and a :data:`keyshard.workers.backends.Backend`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from keyshard.core.option_checks import check_integer, check_text
from keyshard.errors import ConfigError
from keyshard.redaction import shown

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

EMBEDDED = "embedded"
"""The process that runs the source hosts the consumers."""
PROCESSES = "processes"
"""The backend that keyshard provides: processes of this machine."""
GROUP = "keyshard.workers"
"""Group of entry points that add backends."""
WORKERS_MAX = 256
"""Most workers of one source."""
_FORM = re.compile(r"([a-z][a-z0-9_-]*):([0-9]{1,9})(?:\?(.+))?")


@dataclass(frozen=True, slots=True)
class WorkersOption:
    """Number of workers, and their backend."""

    text: str
    """The option as given."""
    backend: str
    count: int
    options: Mapping[str, str]
    """Options for the backend; no duplicates."""

    @classmethod
    def parse(cls, text: object) -> WorkersOption | None:
        """Parse the option; ``None`` is ``embedded``.

        Raises:
            ConfigError: The text is malformed, the backend does not exist, or the number is out of
                bounds.
        """
        if isinstance(text, int):
            raise ConfigError(
                f"workers is {shown(text)}.",
                "Write 'embedded' or 'processes:4', the place of the consumers. The number of "
                "concurrent handlers is the argument workers of run().",
            )
        given = check_text("workers", text, "Write 'embedded' or 'processes:4'.")
        if given == EMBEDDED:
            return None
        found = _FORM.fullmatch(given)
        if found is None or (found[1] != PROCESSES and found[1] not in backends()):
            raise ConfigError(f"workers is {shown(text)}.", _forms())
        check_integer("workers", int(found[2]), 1, WORKERS_MAX)
        try:
            pairs = parse_qsl(found[3] or "", keep_blank_values=True, strict_parsing=bool(found[3]))
        except ValueError as exc:
            raise ConfigError(
                f"workers is {shown(text)}.",
                "Write its options as 'name=value&name=value' after the '?'.",
            ) from exc
        options = dict(pairs)
        if len(options) < len(pairs):
            raise ConfigError(
                f"workers is {shown(text)}, which has an option twice.", "Give each option once."
            )
        if options and found[1] == PROCESSES:
            raise ConfigError(
                f"workers is {shown(text)}, but {PROCESSES!r} takes no options.", "Remove them."
            )
        return cls(given, found[1], int(found[2]), options)


def backends() -> dict[str, EntryPoint]:
    """Return the backends of installed packages, by name."""
    from importlib.metadata import entry_points  # noqa: PLC0415 - it loads many modules

    return {one.name: one for one in entry_points(group=GROUP)}


def _forms() -> str:
    forms = ", ".join(repr(f"{name}:4") for name in (PROCESSES, *sorted(backends())))
    return f"Write 'embedded', or a backend and a number: {forms}."
