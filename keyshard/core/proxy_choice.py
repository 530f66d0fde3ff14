"""Decides which proxy of the environment a request uses.

The variables are those that most programs read: ``http_proxy``, ``https_proxy``, ``all_proxy`` and
``no_proxy``.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

from keyshard.errors import ConfigError

SCHEMES = ("http", "https", "socks5", "socks5h")
"""Schemes of proxies that keyshard can use."""
VALUE_CHARS_MAX = 2_000
"""Longest URL of a proxy, characters."""
_PORTS = {"http": 80, "https": 443}
_BRACKETED = re.compile(r"\[([^\]]*)\](/\d+)?(?::(\d+))?")
"""An IPv6 address or network in ``no_proxy``, perhaps with a port."""
_NAME = re.compile(r"[\w.-]+", re.ASCII)
_FOUR_NUMBERS = re.compile(r"\d+(\.\d+){3}", re.ASCII)
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Variable(NamedTuple):
    """A variable of the environment, and its value. The value may contain a password."""

    name: str
    value: str

    def __repr__(self) -> str:
        return f"{self.name} is {self.shown()!r}"

    def shown(self) -> str:
        """Return the value without a user and a password."""
        before, at, host = self.value.rpartition("@")
        scheme, separator, _ = before.partition("://")
        return f"{scheme + separator if separator else ''}***@{host}" if at else self.value


def proxy_for(url: str, variables: Mapping[str, Variable]) -> Variable | None:
    """Return the proxy of a request; ``None``: it goes directly to the host.

    Requests to loopback addresses and to hosts of ``no_proxy`` use no proxy.

    Args:
        url: URL of the request, with ``http`` or ``https``.
        variables: The variables ``http``, ``https``, ``all`` and ``no``, as far as they are set.

    Returns:
        The variable that names the proxy. Its value is a URL with one of :data:`SCHEMES`.

    Raises:
        ConfigError: The variable is not the URL of a proxy.
    """
    asked = urlsplit(url)
    # An empty variable counts as unset.
    given = [found for name in (asked.scheme, "all") if (found := variables.get(name))]
    chosen = next((one for one in given if one.value.strip()), None)
    no_proxy = variables.get("no", Variable("NO_PROXY", ""))
    if chosen is None or is_direct(asked, no_proxy.value):
        return None
    return _checked(chosen, f"add {asked.hostname} to {no_proxy.name}")


def is_direct(url: SplitResult, no_proxy: str) -> bool:
    """Return whether a request needs no proxy: its host is this machine, or is in ``no_proxy``.

    Args:
        url: URL of the request.
        no_proxy: Items separated by commas or spaces. An item is ``*``, a name, an address or a
            network, and may have a scheme or a port. A name also includes its subdomains. Items
            of another form are ignored.
    """
    host = _ascii(url.hostname or "")
    address = _address(host)
    if host == "localhost" or (address is not None and address.is_loopback):
        return True
    try:
        port = str(url.port or _PORTS.get(url.scheme))
    except ValueError:
        port = ""
    items = (item for item in re.split(r"[\s,]+", no_proxy) if item)
    return any(_includes(item, url.scheme, host, port) for item in items)


def _includes(item: str, scheme: str, host: str, port: str) -> bool:
    of_scheme, _, rest = item.lower().rpartition("://")
    rest = rest.rstrip("/")
    of_port: str | None = None
    if found := _BRACKETED.fullmatch(rest):
        rest, of_port = found[1] + (found[2] or ""), found[3]
    elif rest.count(":") == 1:
        rest, _, of_port = rest.partition(":")
    if of_scheme not in ("", "all", scheme) or of_port not in (None, "", port):
        return False
    address = _address(host)
    if rest == "*" or address is None:
        name = _ascii(rest.removeprefix("*").lstrip("."))
        return rest == "*" or (name != "" and f".{host}".endswith(f".{name}"))
    try:
        return address in ipaddress.ip_network(rest.partition("%")[0], strict=False)
    except ValueError:
        return False


def _address(host: str) -> _Address | None:
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return (found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None) or found


def _ascii(name: str) -> str:
    """Return a name as DNS has it, without the dot of the root."""
    name = name.rstrip(".")
    try:
        return name.encode("idna").decode().lower()
    except UnicodeError:
        return name


def _checked(given: Variable, otherwise: str) -> Variable:
    """Return a proxy whose value is a URL; raises ``ConfigError``, with advice.

    Args:
        given: The variable.
        otherwise: Advice besides the correction of the variable: an imperative without a full stop.
    """
    value = given.value.strip()
    proxy = Variable(given.name, value if "://" in value else f"http://{value}")
    try:
        url = urlsplit(proxy.value)
        is_valid = url.scheme in SCHEMES and url.port != 0 and _is_host(url)
    except ValueError:
        is_valid = False
    if is_valid and value.isprintable() and len(value) <= VALUE_CHARS_MAX:
        return proxy
    wanted = ", ".join(f"{scheme}://" for scheme in SCHEMES)
    raise ConfigError(
        f"The environment variable {given.name} is {given.shown()!r}, which is not the URL of a "
        "proxy that keyshard can use.",
        f"Write http://host:port (possible are {wanted}), or {otherwise}.",
    )


def _is_host(url: SplitResult) -> bool:
    """Return whether the host is a name or an address.

    Raises:
        ValueError: The host looks like an address or a name, but is not valid, such as 1.2.3.999.
    """
    host, at = url.hostname or "", url.netloc.rpartition("@")[2]
    # A password with a slash, and "http:/host", would make another text the host.
    if at.endswith(":") or "@" in url.path + url.query + url.fragment:
        return False
    brackets = _BRACKETED.fullmatch(at)
    if brackets or _FOUR_NUMBERS.fullmatch(host):
        return bool(ipaddress.ip_address(host).version == (6 if brackets else 4))
    return _NAME.fullmatch(host) is not None and bool(host.removesuffix(".").encode("idna"))
