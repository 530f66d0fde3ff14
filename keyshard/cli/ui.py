"""``keyshard ui``: the live page of all that runs on this machine."""

# ruff: noqa: PLC0415 - each command imports its modules when it runs, so that --help is fast.
from __future__ import annotations

from typing import Annotated

import typer

from keyshard.cli.page_token import TokenFileOption, read_token

PORT = 8650
"""Default port."""
LOOK_S = 0.5
"""Interval at which the end of the server is checked, seconds."""


def ui(
    host: Annotated[
        str,
        typer.Option(
            "--host", help="Address to bind. One that other machines can reach needs a token."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65_535, help="Port; 0 for a free one.")
    ] = PORT,
    token_file: TokenFileOption = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host",
            help="Further name by which browsers reach the page, such as that of a proxy. May be "
            "given several times.",
        ),
    ] = None,
) -> None:
    """Serve a live page of the sources, sinks and workers of this user, until Ctrl-C."""

    from keyshard.control import ANY, sockets
    from keyshard.observe.page.options import PageOptions, serve_page

    token = None if token_file is None else read_token(token_file)
    options = PageOptions(host, port, token, allowed_host or ())
    server = serve_page(options, lambda: sockets(ANY))
    try:
        more = "" if token is None else "; it asks for the token"
        typer.echo(f"The page is at {server.url}{more}. Ctrl-C ends it.")
        while server.serving:
            server.wait(LOOK_S)
    finally:
        server.close()
