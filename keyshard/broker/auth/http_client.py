"""The HTTP clients of the admin interface and of issuers, and the proxies that they use.

httpx reads the variables of proxies as well, but all of them at once: a value that a request does
not need could end the program. No client of keyshard lets httpx read them.
"""

from __future__ import annotations

import functools
import os
import re
import ssl
import threading
from importlib.util import find_spec
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies

import httpx

from keyshard.core.proxy_choice import Variable, proxy_for
from keyshard.errors import ConfigError
from keyshard.redaction import Secret

_REFUSES = re.compile(r"(?!408|429)[1-4]\d\d\b")
"""Begins the text of a proxy that does not connect, and would not at a second request."""


class Proxies:
    """The proxies that the environment names now.

    Errors of requests through a proxy name the proxy and its variable.
    """

    def __init__(self) -> None:
        # A name in lower case takes precedence, as in other programs.
        names = {name.lower(): name for name in sorted(os.environ) if os.environ[name]}
        self._variables = {
            kind: Variable(names.get(f"{kind}_proxy", f"{kind}_proxy of the system"), value)
            for kind, value in getproxies().items()
            if kind in ("http", "https", "all", "no")
        }
        self.no_proxy = self._variables["no"].name if "no" in self._variables else "NO_PROXY"
        """Name of the variable that excludes hosts."""
        urls = [_split(one.value) for one in self._variables.values()]
        # While these objects live, the secrets are redacted from texts of proxies and httpx.
        self._own = [Secret(unquote(url[1]), unquote(url[0])) for url in urls if url[1]]

    def of(self, url: str) -> Variable | None:
        """Return the proxy of a request; ``None``: it uses none.

        Raises:
            ConfigError: The variable names no proxy that can be used.
        """
        proxy = proxy_for(url, self._variables)
        if proxy and proxy.value.lower().startswith("socks") and find_spec("socksio") is None:
            raise ConfigError(
                f"The environment variable {proxy.name} is {proxy.shown()!r}, and SOCKS needs the "
                "package socksio, which is missing.",
                f"Install httpx[socks], or add {urlsplit(url).hostname} to {self.no_proxy}.",
            )
        return proxy

    def via(self, url: str) -> str:
        """Return the words that name the proxy of a request; empty: it uses none.

        Raises:
            ConfigError: As for :meth:`of`.
        """
        proxy = self.of(url)
        return "" if proxy is None else f" through {_named(proxy)}"

    def client(self, context: ssl.SSLContext, **options: Any) -> httpx.Client:
        """Create a client. Its requests raise ``ConfigError`` if their proxy cannot be used.

        Args:
            context: How TLS is spoken with hosts.
            options: Further arguments of ``httpx.Client``.
        """
        if set(self._variables) <= {"no"}:
            return httpx.Client(verify=context, trust_env=False, **options)
        return httpx.Client(transport=_Routes(self, context), trust_env=False, **options)


class _Routes(httpx.BaseTransport):
    """Sends each request through its own proxy, because a redirect may name another host."""

    def __init__(self, proxies: Proxies, context: ssl.SSLContext) -> None:
        self._proxies = proxies
        self._context = context
        self._lock = threading.Lock()
        self._transports: dict[Variable | None, httpx.HTTPTransport] = {}

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        proxy = self._proxies.of(str(request.url))
        transport = self._transport(proxy)
        if proxy is None:
            return transport.handle_request(request)
        refused = functools.partial(_refused, proxy, request.url.host, self._proxies.no_proxy)
        try:
            answer = transport.handle_request(request)
        except httpx.TransportError as exc:
            if isinstance(exc, httpx.ProxyError) and _REFUSES.match(str(exc)):
                raise refused(str(exc)) from None
            said = str(exc).strip().rstrip(".") or type(exc).__name__
            no_proxy = self._proxies.no_proxy
            exc.args = (f"{said}, through {_named(proxy)}, which {no_proxy} can exclude",)
            raise
        if answer.status_code == httpx.codes.PROXY_AUTHENTICATION_REQUIRED:
            answer.close()
            raise refused("407 Proxy Authentication Required")
        return answer

    def close(self) -> None:
        for transport in self._transports.values():
            transport.close()

    def _transport(self, proxy: Variable | None) -> httpx.HTTPTransport:
        with self._lock:
            if proxy not in self._transports:
                self._transports[proxy] = httpx.HTTPTransport(
                    verify=self._context,
                    trust_env=False,
                    proxy=None if proxy is None else proxy.value,
                )
            return self._transports[proxy]


def _split(value: str) -> tuple[str, str]:
    """Return the user and the password of a value, which may be no URL."""
    user, _, password = value.rpartition("@")[0].rpartition("://")[2].partition(":")
    return user, password


def _named(proxy: Variable) -> str:
    return f"the proxy {proxy.shown()} of {proxy.name}"


def _refused(proxy: Variable, host: str, no_proxy: str, status: str) -> ConfigError:
    todo = f"Allow {host} there"
    if status.startswith("407"):
        todo = f"Write user:password@ before the host in {proxy.name}"
    named = _named(proxy)
    return ConfigError(
        f"{named[0].upper()}{named[1:]} refuses the connection to {host}: status "
        f"{status.strip().rstrip('.')}.",
        f"{todo}, or add {host} to {no_proxy}.",
    )
