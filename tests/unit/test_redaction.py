"""The secrets of a connection are shown nowhere, in no encoding."""

from __future__ import annotations

import base64
import gc
import html
import json
import logging
import pickle
import socket
import struct
import threading
import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote, quote_plus
from weakref import WeakValueDictionary

import httpx
import pytest

from keyshard import Basic, Connection, OAuth2, Secret, Token
from keyshard.broker.admin.http import AdminHttp
from keyshard.broker.admin.rest import PulsarAdmin
from keyshard.broker.auth import oauth2
from keyshard.broker.auth.credentials import Credentials
from keyshard.broker.preflight import missing_topics
from keyshard.broker.wire.broker import WireBroker
from keyshard.broker.wire.errors import RefusedError, error_of
from keyshard.core.protobuf import fields_of, message
from keyshard.errors import BrokerError, KeyShardError
from keyshard.redaction import redacted, scrubbed, shown
from keyshard.workers.encoding import decode_error, encode_error
from keyshard.workers.server import _LogBuffer
from tests.support.deadlines import deadline

OPAQUE = "opaque/t0ken+of=nobody-" + "x" * 400
PASSWORD = "p@ss & 'w0rd' <1>\"%41/+"
CLIENT_SECRET = "cl1ent\\s3cret?of=nobody"
SHORT = "pa55"
ISSUED = "issued.opaque-token~1"
ENCODINGS: tuple[Callable[[str], str], ...] = (
    str, quote, quote_plus, json.dumps, repr, html.escape,
    lambda text: quote(text, safe="").lower() if text.islower() else quote(text, safe=""),
    lambda text: base64.b64encode(text.encode()).decode(),
    lambda text: base64.urlsafe_b64encode(text.encode()).decode().rstrip("="),
    lambda text: quote(base64.b64encode(text.encode()).decode(), safe=""),
    lambda text: f"Basic {base64.b64encode(text.encode()).decode()}, next",
    lambda text: f"bytearray({text.encode()!r})",
    lambda text: f"<p>{text}</p>" + "y" * 3_000,
    lambda text: "y" * 279 + " " + text,
)  # fmt: skip


class Case(NamedTuple):
    """A connection and its secret texts."""

    made: Callable[[Path, pytest.MonkeyPatch], dict[str, Any]]
    secrets: tuple[str, ...]
    admin_url: str = "https://admin:8443"


def _file(folder: Path, _patch: pytest.MonkeyPatch) -> dict[str, Any]:
    (folder / "token").write_text(OPAQUE + "\n")
    return {"authentication": Token(file=folder / "token")}


def _environment(_folder: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    patch.setenv("KEYSHARD_TEST_TOKEN", OPAQUE)
    return {"authentication": Token(environment="KEYSHARD_TEST_TOKEN")}


def _oauth2_file(folder: Path, _patch: pytest.MonkeyPatch) -> dict[str, Any]:
    held = {"client_id": "app", "client_secret": CLIENT_SECRET}
    (folder / "key.json").write_text(json.dumps(held))
    own = OAuth2(issuer_url="https://issuer", credentials_file=folder / "key.json")
    return {"authentication": own}


def _made(authentication: Any) -> Callable[[Path, pytest.MonkeyPatch], dict[str, Any]]:
    return lambda _folder, _patch: {"authentication": authentication()}


CASES = {
    "token": Case(_made(lambda: Token(OPAQUE)), (OPAQUE,)),
    "token file": Case(_file, (OPAQUE,)),
    "token variable": Case(_environment, (OPAQUE,)),
    "basic": Case(_made(lambda: Basic("ann", PASSWORD)), (PASSWORD, f"ann:{PASSWORD}")),
    "short basic": Case(_made(lambda: Basic("ann", SHORT)), (SHORT, f"ann:{SHORT}")),
    "oauth2": Case(
        _made(
            lambda: OAuth2(
                issuer_url="https://issuer", client_id="app", client_secret=CLIENT_SECRET
            )
        ),
        (CLIENT_SECRET, ISSUED),
    ),
    "oauth2 file": Case(_oauth2_file, (CLIENT_SECRET, ISSUED)),
    "admin url": Case(
        lambda _folder, _patch: {}, ("s3cr3t-of-url", "ann:s3cr3t-of-url"),
        "https://ann:s3cr3t-of-url@admin:8443",
    ),
}  # fmt: skip


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def connection(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Connection:
    # A token that another test was given must not stand in for one of this issuer.
    monkeypatch.setattr(oauth2, "_in_use", WeakValueDictionary())
    return Connection("pulsar://127.0.0.1:1", case.admin_url, **case.made(tmp_path, monkeypatch))


class Echo:
    """A proxy that echoes credentials, and an issuer of tokens.

    Attributes:
        encoding: Encodes the credentials.
        status: Of its answers; 0: it breaks off.
    """

    def __init__(self) -> None:
        self.encoding: Callable[[str], str] = str
        self.status = 403
        self.issues = True
        self.as_header = False
        self.decode_error: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.host == "issuer":
            return self._issue(request)
        header = request.headers.get("Authorization", "")
        scheme, _, said = header.partition(" ")
        if scheme == "Basic":
            said = base64.b64decode(said).decode()
        self.decode_error.append(said)
        said = self.encoding(said)
        if not self.status:
            raise httpx.RemoteProtocolError(f"illegal header line: {said} {header}")
        if self.as_header:
            return httpx.Response(307, headers={"Location": f"http://b/{quote(said)}"})
        kind = len(self.decode_error) % 3
        text = f"You showed {said} ({header})."
        content: dict[str, Any] = {"json": {"reason": text}} if kind else {"text": text}
        return httpx.Response(self.status, **content)

    def _issue(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"token_endpoint": "https://issuer/token"})
        if self.issues:
            return httpx.Response(200, json={"access_token": ISSUED, "expires_in": 3600})
        (said,) = parse_qs(request.content.decode())["client_secret"]
        self.decode_error.append(said)
        text = f"wrong secret {self.encoding(said)} in {request.content.decode()}"
        if not self.status:
            raise httpx.RemoteProtocolError(text)
        return httpx.Response(self.status, json={"error_description": text})


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> Echo:
    client, made = httpx.Client, Echo()
    transport = httpx.MockTransport(made)
    monkeypatch.setattr(httpx, "Client", lambda **how: client(**how | {"transport": transport}))
    return made


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, "keyshard")
    return caplog


def check_redacted(case: Case, texts: str) -> None:
    """Assert that a text has no secret, in any encoding."""
    for secret in case.secrets:
        data = secret.encode()
        for form in (
            secret, quote(secret), quote(secret, safe=""), quote_plus(secret), html.escape(secret),
            json.dumps(secret)[1:-1], repr(secret)[1:-1], base64.b64encode(data).decode(),
            base64.urlsafe_b64encode(data).decode().rstrip("="),
        ):  # fmt: skip
            assert form not in texts, (form, texts)


def everything(error: BaseException, logged: pytest.LogCaptureFixture) -> str:
    facts = getattr(error, "facts", {})
    trace = "".join(traceback.format_exception(error, chain=True))
    return f"{error} {error!r} {facts} {logged.text} {pickle.dumps(error)!r} {_raised(trace)}"


def _raised(trace: str) -> str:
    """Return the lines of a traceback that have errors, without the source lines of this test."""
    return "\n".join(line for line in trace.splitlines() if not line.startswith(" "))


@pytest.mark.parametrize("status", [0, 401, 403, 404, 412, 500])
def test_no_secret_is_shown_if_the_admin_interface_echoes_it(
    case: Case, connection: Connection, echo: Echo, logged: Any, status: int
) -> None:
    echo.status = status
    with closing(PulsarAdmin(connection)) as admin:
        for ask in (admin.cluster, lambda: admin.namespaces("public")):
            for echo.encoding in ENCODINGS:
                with pytest.raises(KeyShardError) as caught:
                    ask()
                check_redacted(case, everything(caught.value, logged))
    assert any(secret in echo.decode_error for secret in case.secrets)


def test_no_secret_is_shown_if_a_redirect_echoes_it(
    case: Case, connection: Connection, echo: Echo, logged: Any
) -> None:
    echo.as_header, echo.status = True, 307
    with closing(AdminHttp(connection)) as admin:
        for echo.encoding in ENCODINGS:
            with pytest.raises(KeyShardError) as caught:
                admin.request("GET", "/admin/v2/clusters")
            check_redacted(case, everything(caught.value, logged))


@pytest.mark.parametrize("case", ["oauth2", "oauth2 file"], indirect=True)
@pytest.mark.parametrize("status", [0, 400])
def test_no_secret_is_shown_if_an_issuer_echoes_it(
    case: Case, connection: Connection, echo: Echo, logged: Any, status: int
) -> None:
    echo.issues, echo.status = False, status
    credentials = Credentials(connection)
    for echo.encoding in ENCODINGS:
        with pytest.raises(BrokerError) as caught:
            credentials.show()
        check_redacted(case, everything(caught.value, logged))
    assert CLIENT_SECRET in echo.decode_error


class EchoBroker:
    """Accepts a connection and refuses it with its credentials."""

    def __init__(self, code: int) -> None:
        self._code = code
        self.encoding: Callable[[str], str] = str
        self.decode_error: list[str] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"pulsar://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                with self._listening.accept()[0] as stream:
                    stream.settimeout(10)
                    (size,) = struct.unpack(">I", stream.recv(4, socket.MSG_WAITALL))
                    frame = stream.recv(size, socket.MSG_WAITALL)
                    command = fields_of(frame[4:])
                    connect = fields_of(command[2])  # type: ignore[arg-type]
                    shown = connect.get(3, b"")
                    assert isinstance(shown, bytes)
                    self.decode_error.append(shown.decode())
                    text = f"refused: {self.encoding(shown.decode())}".encode()
                    refusal = message({1: 14, 14: message({1: 2**64 - 1, 2: self._code, 3: text})})
                    stream.sendall(struct.pack(">II", 4 + len(refusal), len(refusal)) + refusal)
                    stream.recv(1)

    def close(self) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


@pytest.mark.parametrize("code", [0, 3, 4])
@pytest.mark.usefixtures("echo")
def test_no_secret_is_shown_if_a_broker_echoes_the_connection(
    case: Case, connection: Connection, logged: Any, code: int
) -> None:
    broker = EchoBroker(code)
    there = replace(connection, service_url=broker.url, operation_timeout_ms=1_000)
    topic = "persistent://public/default/t"
    wire = WireBroker(there)
    try:
        for broker.encoding in ENCODINGS:
            with pytest.raises(KeyShardError) as caught:
                missing_topics(there, Credentials(there), [topic])
            check_redacted(case, everything(caught.value, logged))
        # Other codes are asked for again until the time is up.
        for broker.encoding in ENCODINGS if code == 3 else ():
            with pytest.raises(KeyShardError) as caught:
                wire.partitions(topic)
            check_redacted(case, everything(caught.value, logged))
    finally:
        wire.close()
        broker.close()
    if connection.authentication is not None:
        assert any(secret in broker.decode_error for secret in case.secrets)


@pytest.mark.usefixtures("echo")
def test_no_secret_is_shown_in_any_refusal_or_by_a_worker(
    case: Case, connection: Connection
) -> None:
    credentials = Credentials(connection)
    with closing(AdminHttp(connection)):
        credentials.show()
        for number, (secret, encoding) in enumerate(product(case.secrets, ENCODINGS)):
            said = encoding(secret)
            refused = RefusedError(number % 27, f"no {said} here".encode())
            error = error_of(refused, "subscribe to", "t", "t", "somebody")
            check_redacted(
                case,
                f"{refused} {refused!r} {refused.said} {error} {decode_error(encode_error(error))}",
            )
            lines: Any = []
            record = logging.LogRecord("keyshard.x", 30, "", 1, "lost: %s", (said,), None)
            _LogBuffer(lines, 10).emit(record)
            check_redacted(case, str(lines))
            check_redacted(case, f"{shown(said)} {redacted(said)}")
            check_redacted(case, str(scrubbed(ValueError(said)).args))
            check_redacted(case, str(BrokerError("no", said=said).facts))


def test_secrets_are_known_while_they_live_and_no_longer() -> None:
    kept, same = Secret("kn0wn-while-alive"), Secret("kn0wn-while-alive")
    assert redacted("a kn0wn-while-alive b") == "a *** b"
    del kept
    gc.collect()
    assert redacted("a kn0wn-while-alive b") == "a *** b", "an equal one still lives"
    copy = pickle.loads(pickle.dumps(Basic("ann", "of-a-copy-of-it")))
    assert redacted(base64.b64encode(b"ann:of-a-copy-of-it").decode()) == "***"
    del same, copy
    gc.collect()
    assert redacted("a kn0wn-while-alive b") == "a kn0wn-while-alive b"


def test_a_short_secret_is_hidden_only_as_a_word_and_a_single_letter_never() -> None:
    secret = Secret("top")
    assert redacted("top: topic stop 'top' (top) x=top&y") == "***: topic stop '***' (***) x=***&y"
    tiny = Secret("a")
    assert redacted("a topic is a text") == "a topic is a text"
    del secret, tiny


def test_many_threads_know_each_others_secrets() -> None:
    kept: list[Secret] = []
    wrong: list[str] = []

    def work(number: int) -> None:
        for i in range(200):
            text = f"secret-of-thread-{number}-{i}"
            own = Secret(text)
            kept.append(own)
            if redacted(f"x {text} y") != f"x {own.hidden_in(text)} y":
                wrong.append(text)
            del kept[: len(kept) - 20]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline(60))
    assert not wrong
