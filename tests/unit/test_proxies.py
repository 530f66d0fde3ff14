"""Proxies of the environment: which request uses one, and one sentence if it cannot be used."""

from __future__ import annotations

import os
import socket
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import keyshard
from keyshard import Connection, OAuth2
from keyshard.broker.admin.http import AdminHttp
from keyshard.broker.admin.rest import PulsarAdmin
from keyshard.broker.auth.credentials import Credentials
from keyshard.core.proxy_choice import Variable, is_direct, proxy_for
from keyshard.errors import (
    AuthenticationError,
    BrokerUnavailableError,
    ConfigError,
    KeyShardError,
)

SECRET = "s3cr3t-of-nobody"
URL = "http://pulsar.test:8080"


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


def version_of(url: str) -> str:
    with closing(PulsarAdmin(Connection(admin_url=url))) as admin:
        return admin.version()


@pytest.mark.parametrize(
    ("no_proxy", "url", "direct"),
    [
        ("", URL, False),
        (" , ,", URL, False),
        ("*", URL, True),
        ("a.com, *", URL, True),
        ("pulsar.test", URL, True),
        ("PULSAR.test.", URL, True),
        ("pulsar.test", "http://pulsar.test.:8080", True),
        ("test", URL, True),
        (".test", URL, True),
        ("*.test", URL, True),
        (".pulsar.test", URL, True),
        ("est", URL, False),
        ("a.pulsar.test", URL, False),
        ("a.com\tpulsar.test", URL, True),
        ("pulsar.test:8080", URL, True),
        ("pulsar.test:8081", URL, False),
        ("pulsar.test:443", "https://pulsar.test", True),
        ("pulsar.test:", URL, True),
        ("http://pulsar.test:8080/", URL, True),
        ("https://pulsar.test", URL, False),
        ("all://pulsar.test", URL, True),
        ("bücher.test", "http://xn--bcher-kva.test", True),
        ("10.1.2.3", "http://10.1.2.3:8080", True),
        ("10.1.2.3:8080", "http://10.1.2.3:8080", True),
        ("10.1.2.3:8443", "http://10.1.2.3:8080", False),
        ("10.0.0.0/8", "http://10.1.2.3:8080", True),
        ("10.9.9.9/8", "http://10.1.2.3:8080", True),
        ("10.0.0.0/8", "http://11.1.2.3:8080", False),
        ("10.0.0.0/8", URL, False),
        ("3", "http://10.1.2.3:8080", False),
        ("fe80::/10", "http://[fe80::1]:8080", True),
        ("[fe80::]/10", "http://[fe80::1]:8080", True),
        ("fe80::1%eth0", "http://[fe80::1%25eth0]:8080", True),
        ("2001:db8::1", "http://[2001:DB8:0::1]:8080", True),
        ("[2001:db8::1]:8080", "http://[2001:db8::1]:8080", True),
        ("[2001:db8::1]:8443", "http://[2001:db8::1]:8080", False),
        ("fe80::/10", "http://10.1.2.3:8080", False),
        ("", "http://localhost:8080", True),
        ("", "http://LOCALHOST.:8080", True),
        ("", "http://127.8.9.1:8080", True),
        ("", "http://[::1]:8080", True),
        ("", "http://[::ffff:127.0.0.1]:8080", True),
        # Items of other forms exclude nothing, and do not end the program.
        ("[::1", URL, False),
        ("fe80::/129,10.0.0.0/99,[,],://,:,.,*.,a:b:c,pulsar.test:x", URL, False),
        ("fe80::/129,10.0.0.0/99,[,],://,:,.", "http://10.1.2.3", False),
    ],
)
def test_hosts_of_no_proxy_and_of_loopback_need_no_proxy(
    no_proxy: str, url: str, direct: bool
) -> None:
    assert is_direct(urlsplit(url), no_proxy) is direct


@pytest.mark.parametrize(
    ("variables", "url", "chosen"),
    [
        ({"http": "http://p:1"}, URL, "http://p:1"),
        ({"http": "http://p:1"}, "https://pulsar.test", None),
        ({"https": "p:1"}, "https://pulsar.test", "http://p:1"),
        ({"all": "HTTPS://p.corp/"}, "https://pulsar.test", "HTTPS://p.corp/"),
        ({"all": "socks5h://p", "http": " p:2\n"}, URL, "http://p:2"),
        ({"all": "[::1]:3128", "http": " "}, URL, "http://[::1]:3128"),
        ({"http": "10.0.0.1:3128"}, URL, "http://10.0.0.1:3128"),
        ({"http": f"ann:{SECRET}@p:1"}, URL, f"http://ann:{SECRET}@p:1"),
        # A variable that the request does not need may have any value.
        ({"https": "ftp://p"}, URL, None),
        ({"http": "p:1", "all": "ftp://p"}, URL, "http://p:1"),
        ({"http": "ftp://p", "no": "pulsar.test"}, URL, None),
    ],
)
def test_a_request_has_the_proxy_of_its_scheme(
    variables: dict[str, str], url: str, chosen: str | None
) -> None:
    found = proxy_for(url, {kind: Variable(kind, value) for kind, value in variables.items()})
    assert (found.value if found else None) == chosen


@pytest.mark.parametrize(
    "value",
    [
        "ftp://{}p:1", "socks4://{}p:1", "http://{}p:port", "http://{}p:0", "http://{}p:65536",
        "http://{}", "{}:3128", "http:/{}p:1", "http://{}[::1", "http://{}[p]:1", "http://{}a..b:1",
        "{}pro xy:1", "'http://{}p:1'", "http://{}1.2.3.400:1", "{}p\x00:1", "://{}p", "http://{}p:",
        "http://{}" + "p" * 3_000,
    ],
)  # fmt: skip
@pytest.mark.parametrize("user", ["", f"ann:{SECRET}@", f"ann:x@{SECRET}/y@"])
def test_a_value_that_is_no_proxy_is_refused_without_its_password(value: str, user: str) -> None:
    variables = {"all": Variable("ALL_PROXY", value.format(user)), "no": Variable("no_proxy", "a")}
    with pytest.raises(ConfigError) as caught:
        proxy_for(URL, variables)
    said = caught.value.message
    assert said.startswith("The environment variable ALL_PROXY is ")
    assert said.endswith("or add pulsar.test to no_proxy.")
    assert SECRET not in said


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"])
def test_the_error_names_the_variable_as_it_is_written(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, f"ftp://ann:{SECRET}@proxy.test")
    with pytest.raises(ConfigError, match=rf"{name} is 'ftp://\*\*\*@proxy.test'") as caught:
        AdminHttp(Connection(admin_url=URL))
    assert not caught.value.retriable
    assert SECRET not in repr(caught.value)


def test_socks_without_its_package_is_an_error_only_of_requests_that_need_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("keyshard.broker.auth.http_client.find_spec", lambda _: None)
    monkeypatch.setenv("ALL_PROXY", f"socks5://ann:{SECRET}@127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", "a.com,fe80::/10,[::1],*.corp")
    AdminHttp(Connection(admin_url="http://pulsar.corp:8080")).close()
    AdminHttp(Connection(admin_url="http://[fe80::1]:8080")).close()
    with pytest.raises(ConfigError, match=r"(?s)ALL_PROXY is .*socksio.*pulsar.test to NO_PROXY"):
        AdminHttp(Connection(admin_url=URL))


def test_requests_for_tokens_use_the_same_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", f"ftp://ann:{SECRET}@proxy.test")
    own = OAuth2(issuer_url="https://issuer.test", client_id="a", client_secret=SECRET)
    credentials = Credentials(Connection(authentication=own))
    with pytest.raises(ConfigError, match=r"HTTPS_PROXY is 'ftp://\*\*\*@proxy.test'"):
        credentials.show()
    monkeypatch.setenv("HTTPS_PROXY", f"http://ann:{SECRET}@127.0.0.1:1")
    with pytest.raises(BrokerUnavailableError, match=r"the proxy .* of HTTPS_PROXY") as caught:
        credentials.show()
    assert SECRET not in repr(caught.value)


class _Proxy(BaseHTTPRequestHandler):
    """A proxy that records what it is asked. It answers for the host of a request itself."""

    protocol_version = "HTTP/1.1"
    asked: list[tuple[str, str | None]]
    answer: tuple[int, bytes, str]

    def do_GET(self) -> None:
        self.asked.append((f"{self.command} {self.path}", self.headers["Proxy-Authorization"]))
        status, body, location = self.answer
        self.send_response(status)
        if location:
            self.send_header("Location", location)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_CONNECT = do_GET  # noqa: N815 - the name that the server looks for

    def log_message(self, *_: object) -> None:
        """Nothing."""


Start = Callable[..., tuple[str, list[tuple[str, str | None]]]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start servers that answer in one way; each is its address and what it was asked."""
    running: list[tuple[ThreadingHTTPServer, threading.Thread]] = []

    def begin(
        status: int, body: bytes = b"", location: str = ""
    ) -> tuple[str, list[tuple[str, str | None]]]:
        asked: list[tuple[str, str | None]] = []
        answers = type("Answers", (_Proxy,), {"asked": asked, "answer": (status, body, location)})
        server = ThreadingHTTPServer(("127.0.0.1", 0), answers)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        running.append((server, thread))
        return f"127.0.0.1:{server.server_port}", asked

    yield begin
    for server, thread in running:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_request_goes_through_its_proxy(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy, asked = start(200, b"5.0.1")
    monkeypatch.setenv("HTTP_PROXY", f"ann:{SECRET}@{proxy}")
    monkeypatch.setenv("NO_PROXY", "fe80::/10,[::1]")
    assert version_of(URL) == "5.0.1"
    header = "Basic " + b64encode(f"ann:{SECRET}".encode()).decode()
    assert asked == [(f"GET {URL}/admin/v2/brokers/version", header)]


def test_each_redirect_has_a_proxy_of_its_own(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, direct = start(200, b"5.0.1")
    proxy, proxied = start(307, location=f"http://{owner}/admin/v2/brokers/version")
    monkeypatch.setenv("HTTP_PROXY", f"http://{proxy}")
    assert version_of(URL) == "5.0.1"
    assert [len(proxied), len(direct)] == [1, 1]
    monkeypatch.setenv("HTTPS_PROXY", "ftp://p")
    proxy, _ = start(307, location="https://other.test/")
    monkeypatch.setenv("HTTP_PROXY", f"http://{proxy}")
    with pytest.raises(ConfigError, match=r"(?s)HTTPS_PROXY is .* add other.test to NO_PROXY"):
        version_of(URL)


@pytest.mark.parametrize(
    "refusal",
    [
        (URL, 407, ConfigError, r"(?s)The proxy .* 407 .* before the host in ALL_PROXY"),
        (URL, 403, AuthenticationError, "through the proxy .* of ALL_PROXY rejects"),
        (URL, 502, BrokerUnavailableError, "through the proxy .* of ALL_PROXY failed: status 502"),
        ("https://pulsar.test", 407, ConfigError, r"before the host in ALL_PROXY, or add"),
        (
            "https://pulsar.test",
            403,
            ConfigError,
            r"403 Forbidden\.\nRemedy: Allow pulsar.test",
        ),
        ("https://pulsar.test", 405, ConfigError, "refuses the connection to pulsar.test"),
        ("https://pulsar.test", 429, BrokerUnavailableError, "429 .* of ALL_PROXY"),
        ("https://pulsar.test", 502, BrokerUnavailableError, "502 Bad Gateway, through the proxy"),
    ],
)
def test_a_refusal_of_a_proxy_names_it(
    refusal: tuple[str, int, type[KeyShardError], str],
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, status, error, said = refusal
    proxy, _ = start(status, b"no")
    monkeypatch.setenv("ALL_PROXY", f"http://ann:{SECRET}@{proxy}")
    with pytest.raises(error, match=said) as caught:
        version_of(url)
    assert SECRET not in repr(caught.value)
    assert caught.value.retriable is (error is BrokerUnavailableError)


def test_a_proxy_that_does_not_listen_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("all_proxy", f"http://ann:{SECRET}@127.0.0.1:1")
    with pytest.raises(
        BrokerUnavailableError,
        match=r"the proxy http://\*\*\*@127.0.0.1:1 of all_proxy, which NO_PROXY can exclude",
    ):
        version_of("https://pulsar.test")


def test_a_proxy_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HTTP_PROXY", f"127.0.0.1:{silent.getsockname()[1]}")
        admin = PulsarAdmin(Connection(admin_url=URL), first_s=0.05)
        with (
            closing(admin),
            pytest.raises(BrokerUnavailableError, match=r"timed out, through the proxy .* of HTTP"),
        ):
            admin.version()


def test_variables_of_trusted_files_do_not_matter(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only ``tls_trust_certs_file_path`` sets the trusted certificates."""
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "missing"))
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path / "missing"))
    broker, _ = start(200, b"5.0.1")
    assert version_of(f"http://{broker}") == "5.0.1"
    monkeypatch.setenv("HTTP_PROXY", f"http://{broker}")
    assert version_of(URL) == "5.0.1"


def test_httpx_reads_no_variable() -> None:
    """httpx fails for invalid values of variables that a request does not need."""
    for path in Path(keyshard.__file__).parent.rglob("*.py"):
        text = path.read_text()
        made = text.count("httpx.Client(") + text.count("httpx.get(")
        assert text.count("trust_env=False") >= made, path
