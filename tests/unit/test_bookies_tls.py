"""Reads from bookies over TLS."""

from __future__ import annotations

import socket
import ssl
import struct
from contextlib import closing
from pathlib import Path

import google_crc32c
import pytest

from keyshard.bookkeeper import bookies as bookies_module
from keyshard.bookkeeper.bookies import Bookies
from keyshard.bookkeeper.failures import Failures
from keyshard.bookkeeper.ledger_reader import EntryNotReadError, LedgerReader
from keyshard.broker.auth.tls import TlsOptions, of_bookies
from keyshard.config.segments import Segments
from keyshard.testing.devbroker.security import Authority
from tests.helpers import wait_until
from tests.support.deadlines import deadline
from tests.support.scripted_bookie import LEDGER, bookie, frame, replicas, sized, whole

pytestmark = pytest.mark.usefixtures("impatient_bookies")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def server(authority: Authority) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*authority.certificate("bookie"))
    return context


def over_tls(authority: Authority, ca: Path | None = None) -> TlsOptions:
    segments = Segments("auto", bookies_trust_certs_file_path=ca or authority.path)
    found = of_bookies(segments)
    assert found is not None
    return found


def said_over_tls(name: str, tls: TlsOptions) -> str:
    with closing(Bookies({}, tls=tls)) as connections:
        reader = LedgerReader(replicas(name), 0, 0, connections, 1 << 20)
        with pytest.raises(EntryNotReadError) as caught:
            reader.read()
        return str(caught.value)


def test_entries_of_any_size_come_over_tls(authority: Authority, server: ssl.SSLContext) -> None:
    """Large ones are in many records of TLS, and several small ones are in one."""
    sizes = [1, 100, 16_300, 16_400, 70_000]

    def body(entry: int) -> bytes:
        return b"%d" % entry + b"x" * sizes[entry % len(sizes)]

    def answer(entry: int) -> bytes:
        head = struct.pack(">qqqq", LEDGER, entry, entry - 1, 100)
        digested = struct.pack(">I", google_crc32c.value(head + body(entry)))
        return frame(entry, body=head + digested + body(entry))

    tls = over_tls(authority)
    with bookie(answer, context=server) as one, closing(Bookies({}, tls=tls)) as connections:
        reader = LedgerReader(replicas(one), 0, 499, connections, 1 << 20)
        found = 0
        while not reader.done:
            for raw in reader.read():
                assert raw.data[raw.position :] == body(raw.id.entry)
                found += 1
    assert found == 500


@pytest.mark.parametrize(
    ("starts", "said"),
    [
        (sized(bytes.fromhex("0a06080310091801 109403")), "not set up for TLS"),
        (sized(bytes.fromhex("0a06080310091801 10f503")), "error 501"),
        (sized(b"\xff" * 5), "error None"),
        (struct.pack(">I", 1 << 30), "answered a request for TLS with 1073741824 bytes"),
        (b"\0\0", "closed the connection after a request for TLS"),
        (b"", "closed the connection after a request for TLS"),
    ],
)
def test_a_bookie_that_does_not_begin_tls_is_named(
    authority: Authority, server: ssl.SSLContext, starts: bytes, said: str
) -> None:
    with bookie(whole, context=server, starts=starts) as one:
        assert said in said_over_tls(one, over_tls(authority))


def test_a_bookie_that_is_silent_after_a_request_for_tls_is_named(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bookies_module, "SILENT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        name = f"127.0.0.1:{silent.getsockname()[1]}"
        assert "did not answer a request for TLS" in said_over_tls(name, over_tls(authority))


def test_certificates_that_do_not_fit_are_named_with_their_options(
    authority: Authority, server: ssl.SSLContext, tmp_path: Path
) -> None:
    with bookie(whole, context=server) as one:
        said = said_over_tls(one, over_tls(authority, Authority(tmp_path).path))
        assert "presents a certificate that is not trusted" in said
        assert "bookies_trust_certs_file_path" in said
    server.load_verify_locations(authority.path)
    server.verify_mode = ssl.CERT_REQUIRED
    with bookie(whole, context=server) as one:
        said = said_over_tls(one, over_tls(authority))
        wanted = "This connection has no certificate. Check bookies_certificate_file_path"
        assert wanted in said
    # It refuses after the handshake, and this side may send before it reads that.
    with (
        bookie(whole, context=server) as one,
        closing(Bookies({}, tls=over_tls(authority))) as sending,
    ):

        def is_failed() -> bool:
            sending.request(one, LEDGER, [0])
            return one in sending.failed

        wait_until(is_failed, deadline(60))
        assert wanted in sending.failed[one]


def test_a_role_that_a_bookie_does_not_admit_is_named(
    authority: Authority, server: ssl.SSLContext
) -> None:
    """It says so with a frame of version 3, after the handshake."""
    failed = sized(bytes.fromhex("0a06080310091801 10f503"))
    with bookie(lambda _: failed, context=server) as one:
        said = said_over_tls(one, over_tls(authority))
    assert "does not admit the client certificate: there is none" in said


def test_a_bookie_that_failed_without_tls_is_still_asked_over_tls(
    authority: Authority, server: ssl.SSLContext
) -> None:
    failures, tls = Failures(), over_tls(authority)
    with bookie(whole, context=server) as one:
        failures.note_bookie((one, None), "it wants TLS")
        with closing(Bookies({}, failures, tls)) as connections:
            assert LedgerReader(replicas(one), 0, 0, connections, 1 << 20).read()
        with closing(Bookies({}, failures)) as connections:
            reader = LedgerReader(replicas(one), 0, 0, connections, 1 << 20)
            with pytest.raises(EntryNotReadError, match="it wants TLS"):
                reader.read()
