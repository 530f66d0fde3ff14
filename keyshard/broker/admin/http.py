"""HTTP requests to the admin REST interface, and errors for failed ones."""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Generator, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import tenacity

from keyshard.broker.auth.credentials import Credentials
from keyshard.broker.auth.errors import lacks, not_accepted
from keyshard.broker.auth.http_client import Proxies
from keyshard.broker.auth.http_log import unlogged
from keyshard.broker.auth.tls import shared_tls_context, tls_error
from keyshard.config.connection import Connection
from keyshard.errors import AdminError, BrokerUnavailableError, ConfigError, TlsError
from keyshard.redaction import Secret, shown

TIMEOUT_S = 10.0
"""Longest time without data from the server, seconds."""
ANSWER_S = 30.0
"""Longest time for the content of an answer, seconds, from the end of its headers."""
CONNECT_S = 3.0
"""Longest time to connect, seconds."""
ENDED_MAX = 20
"""Maximum number of ended connections that one request may get."""
REDIRECTS_MAX = 5
"""Maximum number of redirects of one request."""
UNEXPECTED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""Errors that reading an answer of an unexpected shape may raise."""
_REFUSED = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)
_LACKS = re.compile(r"operation \[(\w+)\] on \w+ \[([^\]]+)\](?: on policy \[(\w+)\])?")
_CONSUMING = ("CONSUME", "SUBSCRIBE", "LOOKUP", "GET_METADATA", "GET_STATS", "GET_TOPICS")
"""Operations that the permission to consume includes."""


class _Authorization(httpx.Auth):
    """Adds credentials to every request. They are read each time, because a token may change."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        if header := self._credentials.header():
            request.headers["Authorization"] = header
        yield request


class _Content(httpx.SyncByteStream):
    """The bytes of an answer, with a time limit, so that a slow trickle cannot block the caller.

    After a server error, its ``close`` ends the connection. If Pulsar 5.0.1 meets an unexpected
    error in a request, the next request on that connection may get status 500, or no answer.
    """

    def __init__(self, answer: httpx.Response) -> None:
        assert isinstance(answer.stream, httpx.SyncByteStream)
        self._stream = answer.stream
        self._connection = answer.extensions.get("network_stream")
        self._is_last = answer.is_server_error
        self._end_s = time.monotonic() + ANSWER_S

    def __iter__(self) -> Iterator[bytes]:
        for part in self._stream:
            if time.monotonic() > self._end_s:
                raise httpx.ReadTimeout(f"the answer was not complete within {ANSWER_S:g} s")
            yield part

    def close(self) -> None:
        if self._is_last and self._connection is not None:
            self._connection.close()
        self._stream.close()


def _was_ended(error: BaseException | None) -> bool:
    """Return whether a request got a connection that :class:`_Content` had closed."""
    while error is not None:
        if isinstance(error, OSError) and error.errno == errno.EBADF:
            return True
        error = error.__cause__ or error.__context__
    return False


_unless_ended = tenacity.Retrying(
    retry=tenacity.retry_if_exception(_was_ended),
    stop=tenacity.stop_after_attempt(ENDED_MAX),
    reraise=True,
)
"""Calls a function that sends a request. If another thread has just ended its connection, nothing
was sent, and the function is called again."""


def _limit(answer_s: float) -> httpx.Timeout:
    return httpx.Timeout(answer_s, connect=min(CONNECT_S, answer_s))


def _watch(answer: httpx.Response) -> None:
    answer.stream = _Content(answer)


class AdminHttp:
    """Creates the HTTP client of the admin interface; no other class does.

    Args:
        connection: A connection with an ``admin_url``.
        first_s: Longest time without data for its first answer, seconds.

    Raises:
        ConfigError: It has no ``admin_url``, a TLS file has invalid content, or the environment
            names a proxy that cannot be used.
    """

    def __init__(self, connection: Connection, first_s: float = TIMEOUT_S) -> None:
        if connection.admin_url is None:
            raise ConfigError("This request needs the admin interface.", "Set admin_url.")
        # Outside the URL, because every error and log line of the client shows the URL.
        try:
            url = httpx.URL(connection.admin_url)
        except httpx.InvalidURL as exc:
            given = shown(connection.admin_url)
            raise ConfigError(
                f"admin_url is {given}, which is not a URL: {exc}.", "Write http://host:port."
            ) from None
        self.url = str(url.copy_with(userinfo=b"")).rstrip("/")
        proxies = Proxies()
        self.where = f"{self.url}{proxies.via(self.url)}"
        """The URL, and the proxy of its requests."""
        self._connection = connection
        self._credentials = Credentials(connection)
        auth: httpx.Auth = _Authorization(self._credentials)
        # While these objects live, the secrets are redacted from texts of servers and httpx.
        self._own = Secret(url.password, url.username), Secret(url.password or url.username)
        if url.userinfo:
            auth = httpx.BasicAuth(url.username, url.password)
        self._limits = {} if first_s == TIMEOUT_S else {"timeout": _limit(first_s)}
        """Timeouts of requests before the first answer."""
        self._client = proxies.client(
            shared_tls_context(connection),
            timeout=_limit(TIMEOUT_S),
            auth=auth,
            event_hooks={"response": [_watch]},
        )

    def request(self, method: str, path: str, **content: Any) -> httpx.Response:
        """Send a request. Return its answer, whatever its status, except 401 and 403.

        Raises:
            BrokerUnavailableError: The interface does not answer.
            TlsError: One side does not trust the other.
            AuthenticationError: The interface rejects the credentials.
            AuthorizationError: The client lacks a permission.
            AdminError: The request is invalid, or is redirected too often.
            ConfigError: A proxy refuses, or a redirect needs a proxy that cannot be used.
        """
        url = f"{self.url}{path}"
        try:
            for _ in range(REDIRECTS_MAX):
                with unlogged():
                    answer = _unless_ended(
                        self._client.request, method, url, **{**self._limits, **content}
                    )
                self._limits = {}
                if answer.next_request is None:
                    self._check_let_in(path, answer)
                    return answer
                url = self._sent_on(answer.next_request.url)
        except httpx.TransportError as exc:
            raise self._unreachable(exc) from None
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise AdminError(
                f"{method} {path} at {self.where} failed: {exc}.", "Check admin_url."
            ) from None
        raise AdminError(
            f"{method} {path} at {self.where} was redirected too often.",
            "Check the advertised addresses of the brokers.",
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _sent_on(self, url: httpx.URL) -> str:
        """Return the URL of a redirect. It gets the credentials too, so TLS must not be dropped."""
        if self.url.startswith("https://") and url.scheme != "https":
            raise TlsError(
                f"{self.url} redirects to {url.host} without TLS.",
                "Configure the brokers to advertise their TLS port.",
            )
        return str(url)

    def _check_let_in(self, path: str, answer: httpx.Response) -> None:
        if answer.status_code not in _REFUSED:
            return
        try:
            reason = str(answer.json()["reason"])
        except UNEXPECTED:
            # The authentication filter refused: only answers about permissions are JSON.
            raise not_accepted(
                f"The admin interface at {self.where}", self._credentials.who(),
                f"status {answer.status_code}",
            ) from None  # fmt: skip
        if found := _LACKS.search(reason):
            operation, what, policy = found.groups()
            permission = "consume" if operation in _CONSUMING else operation
            permission = f"{permission} {policy}" if policy else permission
            raise lacks(self._credentials.who(), permission, what)
        raise lacks(self._credentials.who(), reason, path.partition("?")[0])

    def _unreachable(self, exc: httpx.TransportError) -> BrokerUnavailableError | TlsError:
        where = f"The admin interface at {self.where}"
        if error := tls_error(exc, where, self._connection):
            return error
        hint = "Check admin_url, and check that the broker is running."
        if isinstance(exc, httpx.RemoteProtocolError) and urlsplit(self.url).scheme == "http":
            hint = "Check admin_url: with TLS, it begins with https://."
        return BrokerUnavailableError(
            f"{self.url} does not answer: {exc}.",
            f"{hint} Without admin_url, keyshard leaves out the checks that need it.",
        )
