"""Questions to servers of keyshard: their size is checked, then the asker, then they are read.

A question is a line that shows the asker, and JSON. The line has one of two forms:

- the token of the run, from tasks: they take rows and give nothing that is secret;
- a proof, from :class:`Prover`: both sides show that they know the token, and neither sends it. The
  server shows it first, so a stranger on its port learns nothing. Every answer shows it again.

A proof is an HMAC over nonces of both sides, the endpoint, the command, a number and the arguments.
It is of no use at another server, for another command or with other arguments, and a server takes
each number once. Content is not encrypted.
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

QUESTION_BYTES_MAX = 64 * 1024 * 1024
"""Longest question, bytes."""
CREDENTIAL_BYTES_MAX = 256
"""Longest line that shows the asker, bytes."""
ASKERS_MAX = 1_000
"""Connections of which a server remembers the numbers, the newest."""
EARLY_MAX = 1_000
"""Numbers of a connection that are remembered while an earlier one has not come."""
INTRODUCE = "introduce"
"""Command by which a server shows that it knows the token."""
_NONCE_BYTES = 16

Body = Any
"""``bytes`` or a ``pyarrow.Buffer``."""


def with_token(token: str, asked: Mapping[str, Any]) -> bytes:
    """A question of a task."""
    return _joined(token, _written(asked))


def read_with_token(body: Body, token: str) -> dict[str, Any]:
    """Read a question of :func:`with_token`.

    Raises:
        FlightUnauthenticatedError: The token is another one, or it is no question.
    """
    credential, rest = _parted(body)
    if not hmac.compare_digest(credential, token.encode()):
        raise refusal()
    return _read(rest)


def is_with_token(body: Body) -> bool:
    """Whether a question is one of :func:`with_token`."""
    return b" " not in _parted(body)[0]


def refusal() -> flight.FlightUnauthenticatedError:
    """The error for a question without the token."""
    return flight.FlightUnauthenticatedError("The token is of another run.")


class Prover:
    """The asking side of one connection.

    Args:
        token: Of the run.
        endpoint: Where the server is asked.
    """

    def __init__(self, token: str, endpoint: str) -> None:
        self._token = token
        self._endpoint = endpoint
        self._own = secrets.token_hex(_NONCE_BYTES)
        self._other = ""
        self._numbers = itertools.count(1)

    def introduction(self) -> bytes:
        """The question whose answer :meth:`meet` takes."""
        return self._own.encode()

    def meet(self, answer: bytes) -> bool:
        """Whether a server knows the token."""
        nonce, _, proof = answer[:CREDENTIAL_BYTES_MAX].partition(b" ")
        other = nonce.decode(errors="replace")
        wanted = _proof(self._token, INTRODUCE, self._own, other, self._endpoint)
        self._other = other
        return hmac.compare_digest(wanted.encode(), proof)

    def question(self, command: str, asked: Mapping[str, Any]) -> tuple[int, bytes]:
        """Its number, and what to send."""
        number, content = next(self._numbers), _written(asked)
        proof = self._proof(command, number, _digest(content))
        return number, _joined(f"{self._own} {number} {proof}", content)

    def is_answer(self, number: int, proof: object) -> bool:
        """Whether an answer is from a server that knows the token."""
        return isinstance(proof, str) and hmac.compare_digest(
            self._proof("answer", number).encode(), proof.encode(errors="replace")
        )

    def _proof(self, command: str, number: int, *digest: str) -> str:
        return _proof(
            self._token, command, self._own, self._other, self._endpoint, str(number), *digest
        )


class Verifier:
    """The answering side.

    Args:
        token: Of the run.
        endpoint: Where this server is asked.
    """

    def __init__(self, token: str, endpoint: str) -> None:
        self._token = token
        self._endpoint = endpoint
        self._own = secrets.token_hex(_NONCE_BYTES)
        self._lock = threading.Lock()
        self._came: dict[str, tuple[int, set[int]]] = {}
        """For each asker: the number up to which all questions came, and later ones that came."""

    def introduce(self, body: Body) -> bytes:
        """Answer a server's first question, of anybody.

        Raises:
            FlightUnauthenticatedError: It is no introduction.
        """
        other = bytes(memoryview(body)[: CREDENTIAL_BYTES_MAX + 1]).decode(errors="replace")
        if len(other) != 2 * _NONCE_BYTES:
            raise refusal()
        proof = _proof(self._token, INTRODUCE, other, self._own, self._endpoint)
        return f"{self._own} {proof}".encode()

    def read(self, body: Body, command: str) -> tuple[dict[str, Any], str]:
        """Read a question of :meth:`Prover.question`; also returns the proof for its answer.

        Raises:
            FlightUnauthenticatedError: The asker does not know the token, or it came before.
        """
        credential, rest = _parted(body)
        other, number, proof = (*credential.decode(errors="replace").split(" "), "", "", "")[:3]
        said = other, self._own, self._endpoint, number
        wanted = _proof(self._token, command, *said, _digest(rest))
        if not hmac.compare_digest(wanted.encode(), proof.encode()):
            raise refusal()
        if not self._is_new(other, int(number)):
            raise flight.FlightUnauthenticatedError("The question came before.")
        return _read(rest), _proof(self._token, "answer", *said)

    def _is_new(self, asker: str, number: int) -> bool:
        """Whether a question is no repetition; questions of one asker may overtake each other."""
        with self._lock:
            last, early = self._came.pop(asker, (0, set()))
            is_new = number > last and number not in early
            if is_new:
                early.add(number)
            if len(early) > EARLY_MAX:
                last = min(early) - 1
            while last + 1 in early:
                last += 1
                early.remove(last)
            self._came[asker] = last, early
            if len(self._came) > ASKERS_MAX:
                self._came.pop(next(iter(self._came)))
            return is_new


def _proof(token: str, *said: str) -> str:
    return hmac.new(token.encode(), json.dumps(said).encode(), hashlib.sha256).hexdigest()


def _digest(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()


def _written(asked: Mapping[str, Any]) -> bytes:
    return json.dumps(asked).encode()


def _joined(credential: str, content: bytes) -> bytes:
    return credential.encode(errors="replace") + b"\n" + content


def _parted(body: Body) -> tuple[bytes, memoryview]:
    """The line that shows the asker, and the rest unread."""
    view = memoryview(body)
    if len(view) > QUESTION_BYTES_MAX:
        raise flight.FlightUnauthenticatedError(
            f"A question is longer than {QUESTION_BYTES_MAX} bytes."
        )
    credential, end, _ = bytes(view[:CREDENTIAL_BYTES_MAX]).partition(b"\n")
    return (credential, view[len(credential) + 1 :]) if end else (b"", view[:0])


def _read(rest: memoryview) -> dict[str, Any]:
    try:
        asked = json.loads(bytes(rest))
    except (ValueError, RecursionError) as exc:
        raise flight.FlightServerError(f"The question is no JSON: {exc}.") from exc
    if not isinstance(asked, dict):
        raise flight.FlightServerError("The question is no JSON object.")
    return asked
