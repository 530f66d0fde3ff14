"""Files for TLS: each invalid one is one sentence, and no passphrase is asked for."""

from __future__ import annotations

import re
import ssl
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from keyshard import Connection
from keyshard.broker.auth.tls import shared_tls_context, tls_context, tls_error
from keyshard.errors import ConfigError
from keyshard.testing.devbroker.security import Authority

URL = "pulsar+ssl://broker:6651"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def test_files_that_fit_are_used(authority: Authority) -> None:
    certificate, key = authority.certificate("app")
    context = tls_context(
        Connection(
            URL, tls_trust_certs_file_path=authority.path, tls_hostname_verification=False,
            tls_certificate_file_path=certificate, tls_key_file_path=key,
        )
    )  # fmt: skip
    assert (context.check_hostname, context.verify_mode) == (False, ssl.CERT_REQUIRED)
    assert tls_context(Connection(URL)).check_hostname


def test_keys_are_for_this_user_alone(authority: Authority) -> None:
    for path in authority.certificate("app"):
        assert path.stat().st_mode & 0o077 == 0


def test_files_that_do_not_fit_are_named(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.certificate("app")
    _, other = authority.certificate("other")
    junk = tmp_path / "junk.pem"
    junk.write_text("-----BEGIN CERTIFICATE-----\nno\n")
    locked = tmp_path / "locked.pem"
    made = serialization.load_pem_private_key(key.read_bytes(), None)
    locked.write_bytes(
        made.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"pass"),
        )
    )
    with pytest.raises(
        ConfigError, match=r"tls_trust_certs_file_path .* contains no PEM certificates"
    ):
        tls_context(Connection(URL, tls_trust_certs_file_path=junk))
    for wrong in (other, junk, locked):
        connection = Connection(URL, tls_certificate_file_path=certificate, tls_key_file_path=wrong)
        with pytest.raises(ConfigError, match="are not a matching pair") as caught:
            tls_context(connection)
        assert str(wrong) in str(caught.value)


def test_a_plain_connection_has_no_tls() -> None:
    assert tls_error(ConnectionResetError(), "x", Connection(URL)) is None
    assert tls_error(ssl.SSLError(1, "[SSL] WRONG_VERSION_NUMBER"), "x", Connection(URL)) is None


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("certificate has expired", "Renew the certificate of the broker"),
        ("certificate is not yet valid", "correct the clock of this machine"),
        ("self-signed certificate in certificate chain", "tls_trust_certs_file_path"),
    ],
)
def test_a_certificate_that_is_refused_is_named_with_its_remedy(reason: str, said: str) -> None:
    error = ssl.SSLCertVerificationError()
    error.verify_message = reason
    found = tls_error(error, "The broker", Connection(URL))
    assert found is not None
    assert reason in found.message
    assert said in found.message


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("TLSV1_ALERT_PROTOCOL_VERSION", r"Enable TLS 1\.2 or 1\.3"),
        ("SSLV3_ALERT_CERTIFICATE_EXPIRED", "Check tls_certificate_file_path"),
    ],
)
def test_an_alert_of_the_broker_is_named_with_its_remedy(reason: str, said: str) -> None:
    error = ssl.SSLError()
    error.reason = reason
    found = tls_error(error, "The broker", Connection(URL))
    assert found is not None
    assert re.search(said, found.message)


def test_authorities_are_read_once_in_a_process_and_again_when_a_file_is_another(
    authority: Authority, tmp_path: Path
) -> None:
    assert shared_tls_context(Connection(URL)) is shared_tls_context(Connection("pulsar://b:6650"))
    certificate, key = authority.certificate("app")
    connection = Connection(
        URL, tls_trust_certs_file_path=authority.path, tls_certificate_file_path=certificate,
        tls_key_file_path=key,
    )  # fmt: skip
    first = shared_tls_context(connection)
    assert shared_tls_context(connection) is first
    lax = replace(connection, tls_hostname_verification=False)
    assert shared_tls_context(lax).check_hostname is not first.check_hostname
    (tmp_path / "new.pem").write_bytes(Path(key).read_bytes())
    (tmp_path / "new.pem").replace(key)
    assert shared_tls_context(connection) is not first
    Path(key).unlink()
    for _ in range(2):
        with pytest.raises(ConfigError, match="are not a matching pair"):
            shared_tls_context(connection)
