"""The configuration file of a development broker."""

from __future__ import annotations

import re
from collections.abc import Mapping

from keyshard.errors import ConfigError

_SETTING = re.compile(r"\s*([A-Za-z][\w.]*)\s*=")

DEFAULT_SETTINGS: Mapping[str, str] = {
    # A topic without a subscription and its messages would be deleted after a minute.
    "brokerDeleteInactiveTopicsEnabled": "false",
    "brokerShutdownTimeoutMs": "5000",
    "webSocketServiceEnabled": "false",
}
"""What differs from Pulsar's own standalone settings, besides addresses and ports."""


def render_config(template: str, settings: Mapping[str, str]) -> str:
    """A broker's configuration: the template with some settings replaced or added.

    Args:
        template: Text of Pulsar's ``standalone.conf``.
        settings: Names and values; later lines of the template with one of these names go.

    Raises:
        ConfigError: A name or a value cannot stand in the file.
    """
    for name, value in settings.items():
        if not re.fullmatch(r"[A-Za-z][\w.]*", name) or "\n" in value or "\r" in value:
            raise ConfigError(
                f"Broker setting {name!r}={value!r} cannot be written: a name has letters, digits, "
                "'_' and '.', and a value one line."
            )
    kept = [
        line
        for line in template.splitlines()
        if not (match := _SETTING.match(line)) or match[1] not in settings
    ]
    added = [f"{name}={value}" for name, value in settings.items()]
    return "\n".join([*kept, "", "# Set by keyshard", *added, ""])
