"""Authentication of requests between keyshard's processes.

A server checks the size of a request, then its sender, and parses it last. A request is a
credential line, followed by JSON. The credential has one of two forms:

- the token of the run, for tasks: they read rows and send nothing secret;
- a proof, from :class:`RequestSigner`: both sides prove that they know the token, and neither sends
  it. The server proves it first, so a foreign server on its port learns nothing. Every answer
  proves it again.

A proof is an HMAC over nonces of both sides, the endpoint, the command, a number and the arguments.
It is useless for another server, another command or other arguments, and a server accepts each
number once. Content is not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import json
import secrets
import threading
from collections.abc import Mapping
from typing import Any

from pyarrow import flight

REQUEST_BYTES_MAX = 64 * 1024 * 1024
"""Longest request, bytes."""
CREDENTIAL_BYTES_MAX = 256
"""Longest credential line, bytes."""
CLIENTS_MAX = 1_000
"""Maximum number of clients whose request numbers a server remembers; the oldest are dropped."""
EARLY_MAX = 1_000
"""Maximum number of remembered request numbers of one client after a missing number."""
INTRODUCE = "introduce"
"""Command by which a server proves that it knows the token."""
_NONCE_BYTES = 16

Body = Any
"""``bytes`` or a ``pyarrow.Buffer``."""


def with_token(token: str, request: Mapping[str, Any]) -> bytes:
    """Encode a request of a task."""
    return _joined(token, _encoded(request))


def read_with_token(body: Body, token: str) -> dict[str, Any]:
    """Decode a request of :func:`with_token`.

    Raises:
        FlightUnauthenticatedError: The token is wrong, or the request is malformed.
    """
    credential, rest = _split(body)
    if not hmac.compare_digest(credential, token.encode()):
        raise unauthenticated()
    return _read(rest)


def is_with_token(body: Body) -> bool:
    """Return whether a request has the form of :func:`with_token`."""
    return b" " not in _split(body)[0]


def unauthenticated() -> flight.FlightUnauthenticatedError:
    """Create the error for a request without the token."""
    return flight.FlightUnauthenticatedError("The token belongs to another run.")


class RequestSigner:
    """The client side of one connection.

    Args:
        token: Token of the run.
        endpoint: Address of the server.
    """

    def __init__(self, token: str, endpoint: str) -> None:
        self._token = token
        self._endpoint = endpoint
        self._own = secrets.token_hex(_NONCE_BYTES)
        self._other = ""
        self._numbers = itertools.count(1)

    def introduction(self) -> bytes:
        """Create the request whose answer :meth:`meet` checks."""
        return self._own.encode()

    def meet(self, answer: bytes) -> bool:
        """Check the server's answer to the introduction. Return whether it knows the token."""
        nonce, _, proof = answer[:CREDENTIAL_BYTES_MAX].partition(b" ")
        other = nonce.decode(errors="replace")
        expected = _proof(self._token, INTRODUCE, self._own, other, self._endpoint)
        self._other = other
        return hmac.compare_digest(expected.encode(), proof)

    def request(self, command: str, content: Mapping[str, Any]) -> tuple[int, bytes]:
        """Return the number of a new request, and its bytes."""
        number, encoded = next(self._numbers), _encoded(content)
        proof = self._proof(command, number, _digest(encoded))
        return number, _joined(f"{self._own} {number} {proof}", encoded)

    def is_answer(self, number: int, proof: object) -> bool:
        """Return whether an answer is from a server that knows the token."""
        return isinstance(proof, str) and hmac.compare_digest(
            self._proof("answer", number).encode(), proof.encode(errors="replace")
        )

    def _proof(self, command: str, number: int, *digest: str) -> str:
        return _proof(
            self._token, command, self._own, self._other, self._endpoint, str(number), *digest
        )


class RequestVerifier:
    """The server side.

    Args:
        token: Token of the run.
        endpoint: Address of this server.
    """

    def __init__(self, token: str, endpoint: str) -> None:
        self._token = token
        self._endpoint = endpoint
        self._own = secrets.token_hex(_NONCE_BYTES)
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[int, set[int]]] = {}
        """Per client: the number up to which all requests arrived, and later arrived numbers."""

    def introduce(self, body: Body) -> bytes:
        """Answer the first request of a client, which carries no proof yet.

        Raises:
            FlightUnauthenticatedError: The request is not an introduction.
        """
        other = bytes(memoryview(body)[: CREDENTIAL_BYTES_MAX + 1]).decode(errors="replace")
        if len(other) != 2 * _NONCE_BYTES:
            raise unauthenticated()
        proof = _proof(self._token, INTRODUCE, other, self._own, self._endpoint)
        return f"{self._own} {proof}".encode()

    def read(self, body: Body, command: str) -> tuple[dict[str, Any], str]:
        """Decode a request of :meth:`RequestSigner.request`. Also return the proof for its answer.

        Raises:
            FlightUnauthenticatedError: The client does not know the token, or repeats a request.
        """
        credential, rest = _split(body)
        other, number, proof = (*credential.decode(errors="replace").split(" "), "", "", "")[:3]
        facts = other, self._own, self._endpoint, number
        expected = _proof(self._token, command, *facts, _digest(rest))
        if not hmac.compare_digest(expected.encode(), proof.encode()):
            raise unauthenticated()
        if not self._is_new(other, int(number)):
            raise flight.FlightUnauthenticatedError("The request was received before.")
        return _read(rest), _proof(self._token, "answer", *facts)

    def _is_new(self, client: str, number: int) -> bool:
        """Return whether a request is not a repetition; requests of one client may be reordered."""
        with self._lock:
            last, early = self._seen.pop(client, (0, set()))
            is_new = number > last and number not in early
            if is_new:
                early.add(number)
            if len(early) > EARLY_MAX:
                last = min(early) - 1
            while last + 1 in early:
                last += 1
                early.remove(last)
            self._seen[client] = last, early
            if len(self._seen) > CLIENTS_MAX:
                self._seen.pop(next(iter(self._seen)))
            return is_new


def _proof(token: str, *facts: str) -> str:
    return hmac.new(token.encode(), json.dumps(facts).encode(), hashlib.sha256).hexdigest()


def _digest(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()


def _encoded(request: Mapping[str, Any]) -> bytes:
    return json.dumps(request).encode()


def _joined(credential: str, content: bytes) -> bytes:
    return credential.encode(errors="replace") + b"\n" + content


def _split(body: Body) -> tuple[bytes, memoryview]:
    """Split a request into its credential line and the unparsed rest."""
    view = memoryview(body)
    if len(view) > REQUEST_BYTES_MAX:
        raise flight.FlightUnauthenticatedError(
            f"A request exceeds the limit of {REQUEST_BYTES_MAX} bytes."
        )
    credential, end, _ = bytes(view[:CREDENTIAL_BYTES_MAX]).partition(b"\n")
    return (credential, view[len(credential) + 1 :]) if end else (b"", view[:0])


def _read(rest: memoryview) -> dict[str, Any]:
    try:
        request = json.loads(bytes(rest))
    except (ValueError, RecursionError) as exc:
        raise flight.FlightServerError(f"The request is not JSON: {exc}.") from exc
    if not isinstance(request, dict):
        raise flight.FlightServerError("The request is not a JSON object.")
    return request
