"""Requests to the admin REST interface of a connection, and what refuses them, in one sentence."""

from __future__ import annotations

import re
import time
from collections.abc import Generator, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx

from keyshard.broker.pulsar.credentials import Credentials
from keyshard.broker.pulsar.http_log import unlogged
from keyshard.broker.pulsar.refusals import lacks, not_accepted
from keyshard.broker.pulsar.tls import shared_tls_context, tls_error
from keyshard.config.connection import Connection
from keyshard.errors import AdminError, BrokerUnavailableError, ConfigError, TlsError
from keyshard.redaction import Secret, shown

TIMEOUT_S = 10.0
"""Longest time in which nothing comes of an answer, seconds."""
ANSWER_S = 30.0
"""Longest time in which the content of an answer comes, seconds, from the end of its headers."""
CONNECT_S = 3.0
"""Longest time to be connected, seconds."""
REDIRECTS_MAX = 5
"""Brokers that may send a request to another one."""
UNEXPECTED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""Errors of reading an answer that has an unexpected shape."""
_REFUSED = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)
_LACKS = re.compile(r"operation \[(\w+)\] on \w+ \[([^\]]+)\](?: on policy \[(\w+)\])?")
_CONSUMING = ("CONSUME", "LOOKUP", "GET_METADATA", "GET_STATS", "GET_TOPICS")
"""What who may consume, or produce, may do as well."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class _Authorization(httpx.Auth):
    """Shows who this is in every request, and reads it anew: a token may be another by now."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        if header := self._credentials.header():
            request.headers["Authorization"] = header
        yield request


class _InTime(httpx.SyncByteStream):
    """The bytes of an answer; a few of them every now and then do not keep anybody waiting."""

    def __init__(self, stream: httpx.SyncByteStream) -> None:
        self._stream = stream
        self._end_s = time.monotonic() + ANSWER_S

    def __iter__(self) -> Iterator[bytes]:
        for part in self._stream:
            if time.monotonic() > self._end_s:
                raise httpx.ReadTimeout(f"the answer did not come whole in {ANSWER_S:g} s")
            yield part

    def close(self) -> None:
        self._stream.close()


def _limit(answer_s: float) -> httpx.Timeout:
    return httpx.Timeout(answer_s, connect=min(CONNECT_S, answer_s))


def _in_time(answer: httpx.Response) -> None:
    assert isinstance(answer.stream, httpx.SyncByteStream)
    answer.stream = _InTime(answer.stream)


class AdminHttp:
    """The one place that makes a client of the admin interface.

    Args:
        connection: It has an ``admin_url``.
        first_s: Longest time until anything comes of its first answer, seconds.

    Raises:
        ConfigError: It has none, or a file of TLS does not hold what it should.
    """

    def __init__(self, connection: Connection, first_s: float = TIMEOUT_S) -> None:
        if connection.admin_url is None:
            raise ConfigError("The admin interface is needed. Give admin_url.")
        # Beside the URL, because every error and log line of the client shows that.
        try:
            url = httpx.URL(connection.admin_url)
        except httpx.InvalidURL as exc:
            given = shown(connection.admin_url)
            raise ConfigError(f"admin_url is {given}, which is no URL: {exc}.") from None
        self.url = str(url.copy_with(userinfo=b"")).rstrip("/")
        self._connection = connection
        self._credentials = Credentials(connection)
        auth: httpx.Auth = _Authorization(self._credentials)
        # Texts of others are printed without them.
        self._own = Secret(url.password, url.username), Secret(url.password or url.username)
        if url.userinfo:
            auth = httpx.BasicAuth(url.username, url.password)
        self._limits = {} if first_s == TIMEOUT_S else {"timeout": _limit(first_s)}
        """Of requests before the first answer."""
        self._client = httpx.Client(
            timeout=_limit(TIMEOUT_S),
            auth=auth,
            event_hooks={"response": [_in_time]},
            verify=shared_tls_context(connection),
            # No proxy of the environment stands between this machine and itself.
            trust_env=url.host not in _LOOPBACK,
        )

    def request(self, method: str, path: str, **content: Any) -> httpx.Response:
        """The answer, of whatever status but 401 and 403.

        Raises:
            BrokerUnavailableError: There is none.
            TlsError: The two sides do not trust each other.
            AuthenticationError: It does not accept who this is.
            AuthorizationError: Who this is lacks a permission.
            AdminError: The request cannot be made.
        """
        url = f"{self.url}{path}"
        try:
            for _ in range(REDIRECTS_MAX):
                with unlogged():
                    answer = self._client.request(method, url, **{**self._limits, **content})
                self._limits = {}
                if answer.next_request is None:
                    self._check_let_in(path, answer)
                    return answer
                url = self._sent_on(answer.next_request.url)
        except httpx.TransportError as exc:
            raise self._unreachable(exc) from None
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise AdminError(f"{method} {path} at {self.url} failed: {exc}.") from None
        raise AdminError(f"{method} {path} at {self.url} is sent from broker to broker.")

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _sent_on(self, url: httpx.URL) -> str:
        """Where the owner of a topic is: it is told who this is, too, but not in the clear."""
        if self.url.startswith("https://") and url.scheme != "https":
            raise TlsError(
                f"{self.url} sends a request on to {url.host} without TLS. Let the brokers "
                "advertise their TLS port."
            )
        return str(url)

    def _check_let_in(self, path: str, answer: httpx.Response) -> None:
        if answer.status_code not in _REFUSED:
            return
        try:
            reason = str(answer.json()["reason"])
        except UNEXPECTED:
            # The filter before the interface; what may not be done is said as JSON.
            raise not_accepted(
                f"The admin interface at {self.url}", self._credentials.who(),
                f"status {answer.status_code}",
            ) from None  # fmt: skip
        if found := _LACKS.search(reason):
            operation, what, policy = found.groups()
            permission = "consume" if operation in _CONSUMING else operation
            permission = f"{permission} {policy}" if policy else permission
            raise lacks(self._credentials.who(), permission, what)
        raise lacks(self._credentials.who(), reason, path.partition("?")[0])

    def _unreachable(self, exc: httpx.TransportError) -> BrokerUnavailableError | TlsError:
        where = f"The admin interface at {self.url}"
        if error := tls_error(exc, where, self._connection):
            return error
        hint = "Check admin_url and that the broker is running"
        if isinstance(exc, httpx.RemoteProtocolError) and urlsplit(self.url).scheme == "http":
            hint = "Check admin_url: with TLS it begins with https://"
        return BrokerUnavailableError(
            f"{self.url} does not answer: {exc}. {hint}; without admin_url keyshard does without "
            "the checks it allows."
        )
