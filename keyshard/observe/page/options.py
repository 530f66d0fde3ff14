"""The options of a page, and its start. The web server is imported only when a page starts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keyshard.errors import ConfigError
from keyshard.observe.page.guard import Guard

if TYPE_CHECKING:
    from keyshard.observe.page.server import PageServer
    from keyshard.observe.page.status_watcher import Sockets

INSTALL = "pip install 'keyshard[ui]'"


@dataclass(frozen=True, slots=True)
class PageOptions:
    """Address and token of a page."""

    host: str
    port: int
    token: str | None = None
    names: Collection[str] = ()
    """Further names by which browsers reach the host."""

    def __repr__(self) -> str:
        return f"PageOptions({self.host!r}, {self.port})"


def serve_page(options: PageOptions, sockets: Sockets) -> PageServer:
    """Serve a page.

    Args:
        options: Its address and token.
        sockets: Returns the control sockets of the sources, sinks and workers to show.

    Raises:
        ConfigError: The address cannot be used, it needs a token, or a package is missing.
    """
    guard = Guard.of(options.host, options.token, options.names)
    try:
        from keyshard.observe.page.server import PageServer  # noqa: PLC0415
    except ImportError as exc:
        raise ConfigError(
            f"The page needs the package {exc.name}, which is not installed.", f"Run {INSTALL}."
        ) from exc
    return PageServer(options.host, options.port, guard, sockets)
