"""Decides which requests the page answers: host, origin and token. No I/O."""

from __future__ import annotations

import hmac
import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address, ip_address, ip_network
from urllib.parse import urlsplit

from keyshard.core.option_checks import check_token
from keyshard.errors import ConfigError
from keyshard.redaction import shown

LOOPBACK_NAMES = frozenset({"localhost"})
JSON = "application/json"
API = "/api/"
"""Paths below it have data; the others are the files of the page."""
WRONG_TOKENS_MAX = 10
"""Maximum number of wrong tokens of one address in :data:`WRONG_TOKENS_S`."""
WRONG_TOKENS_S = 60.0
"""Time for which a wrong token counts, seconds."""
ADDRESSES_MAX = 1_000
"""Maximum number of addresses whose wrong tokens are counted; the oldest is forgotten first."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The answer to a request that is not served."""

    status: int
    text: str
    retry_after_s: int | None = None
    """Time after which the request may be sent again, seconds."""


class WrongTokens:
    """Counts wrong tokens by address, so that tokens cannot be guessed at the rate of requests.

    A right token is refused, too, while its address waits: otherwise the answer would tell it.
    """

    def __init__(self) -> None:
        self._at_s: dict[str, deque[float]] = {}
        """Times of the last wrong tokens of each address, oldest first."""

    def wait_s(self, client: str, now_s: float) -> float:
        """Return the time for which an address must wait, seconds; 0 if it need not.

        Args:
            client: Address of the client.
            now_s: Monotonic time, seconds.
        """
        at_s = self._at_s.get(_counted(client))
        if at_s is None or len(at_s) < WRONG_TOKENS_MAX:
            return 0.0
        return max(0.0, at_s[0] + WRONG_TOKENS_S - now_s)

    def add(self, client: str, now_s: float) -> None:
        """Count a wrong token.

        Args:
            client: Address of the client.
            now_s: Monotonic time, seconds.
        """
        counted = _counted(client)
        at_s = self._at_s.pop(counted, deque(maxlen=WRONG_TOKENS_MAX))
        at_s.append(now_s)
        self._at_s[counted] = at_s
        if len(self._at_s) > ADDRESSES_MAX:
            del self._at_s[next(iter(self._at_s))]


_ELSEWHERE = Refusal(403, "The request comes from another site.")


@dataclass(frozen=True, slots=True)
class Guard:
    """Checks of the requests to one server.

    A page of another site can send requests to this server from the browser of a user. So the host
    of a request must be an address or a known name: a name that another site has bound to a
    loopback address (DNS rebinding) is refused. Its origin must be this server.
    """

    token: str | None
    """Required from every request for data; ``None``: none is."""
    names: frozenset[str]
    """Names of hosts by which browsers may reach the server, in lower case."""
    loopback: bool
    """Whether only this machine can reach the server."""
    wrong_tokens: WrongTokens = field(default_factory=WrongTokens, compare=False, repr=False)

    @classmethod
    def of(cls, host: str, token: str | None, names: Collection[str] = ()) -> Guard:
        """Check the address and the token of a server.

        Args:
            host: Address that the server binds.
            token: Its token, if it has one.
            names: Further names of its host.

        Raises:
            ConfigError: Other machines can reach the address, and there is no token; or the token
                is not usable.
        """
        loopback = is_loopback(host)
        if token is not None:
            check_token("The token", token)
        elif not loopback:
            raise ConfigError(
                f"The page on {shown(host)} can be reached from other machines, so it needs a "
                "token.",
                "Set ui_token (keyshard ui: --token-file), or bind 127.0.0.1.",
            )
        known = {host.lower(), *map(str.lower, names)}
        return cls(token, LOOPBACK_NAMES | frozenset(known), loopback)

    def refusal(
        self,
        method: str,
        path: str,
        headers: Mapping[str, list[str]],
        *,
        client: str,
        now_s: float,
    ) -> Refusal | None:
        """Return the answer to a request that is refused; ``None`` if it is served.

        Args:
            method: HTTP method.
            path: Path, without the query.
            headers: Values of each header by its name in lower case.
            client: Address of the client.
            now_s: Monotonic time, seconds.
        """
        hosts = headers.get("host", [])
        if len(hosts) != 1 or not self._is_own(hosts[0]):
            return Refusal(
                421,
                f"The page is not served for host {shown(', '.join(hosts))}. Use its address, or "
                "name the host with --allowed-host.",
            )
        of_api = path.startswith(API)
        if method not in ("GET", "HEAD") and not (method == "POST" and of_api):
            return Refusal(405, f"Method {shown(method)} is not served.")
        if any(not _is_same(origin, hosts[0]) for origin in headers.get("origin", [])):
            return _ELSEWHERE
        if not of_api:
            return None
        return self._refusal_of_api(method, headers) or self._refusal_of_token(
            headers.get("authorization", []), client, now_s
        )

    def _refusal_of_api(self, method: str, headers: Mapping[str, list[str]]) -> Refusal | None:
        sites = headers.get("sec-fetch-site", [])
        if any(site not in ("same-origin", "none") for site in sites):
            return _ELSEWHERE
        if method == "POST" and headers.get("content-type") != [JSON]:
            return Refusal(415, f"The content type must be {JSON}.")
        return None

    def _refusal_of_token(self, given: list[str], client: str, now_s: float) -> Refusal | None:
        if self.token is None:
            return None
        # A request without a token guesses nothing: a browser sends one before it asks its user.
        wait_s = self.wrong_tokens.wait_s(client, now_s) if given else 0.0
        if wait_s > 0:
            seconds = math.ceil(wait_s)
            text = f"Too many wrong tokens came from this address. Try again in {seconds} s."
            return Refusal(429, text, seconds)
        if self._has_token(given):
            return None
        if given:
            self.wrong_tokens.add(client, now_s)
        return Refusal(401, "The token is missing or wrong.")

    def _is_own(self, host: str) -> bool:
        name = _host_of(host)
        if name is None:
            return False
        try:
            address = ip_address(name)
        except ValueError:
            return name in self.names
        return not self.loopback or address.is_loopback

    def _has_token(self, values: list[str]) -> bool:
        assert self.token is not None
        given = values[0] if len(values) == 1 else ""
        # The token is ASCII; a header may have any byte.
        return hmac.compare_digest(given.encode("latin-1"), f"Bearer {self.token}".encode())


def is_loopback(host: str) -> bool:
    """Whether an address reaches this machine only."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() in LOOPBACK_NAMES


def _counted(client: str) -> str:
    """Return what wrong tokens count for: a network that one machine may have for itself."""
    try:
        address = ip_address(client.partition("%")[0])
    except ValueError:
        return client
    if isinstance(address, IPv4Address) or address.ipv4_mapped is not None:
        return str(address)
    return str(ip_network((address, 64), strict=False))


def _host_of(header: str) -> str | None:
    """Return the host of a ``Host`` header in lower case; ``None`` if it is malformed."""
    try:
        parts = urlsplit(f"//{header}")
        parts.port  # noqa: B018 - raises if it is no port
    except ValueError:
        return None
    if parts.netloc != header or parts.username is not None or not parts.hostname:
        return None
    return parts.hostname.lower()


def _is_same(origin: str, host: str) -> bool:
    scheme, separator, rest = origin.partition("://")
    return bool(separator) and scheme in ("http", "https") and rest.lower() == host.lower()
