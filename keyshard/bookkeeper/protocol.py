"""BookKeeper's binary protocol, version 2, as far as plain reads of entries need it.

Source: ``BookieProtocol``, ``BookieProtoEncoding`` and ``DigestManager`` of Apache BookKeeper 4.17.
A plain read has no flags: it never fences or recovers a ledger. TLS begins with a request of
version 3 (``START_TLS`` of ``BookkeeperProtocol.proto``), after which a bookie takes those of
version 2. Received bytes are untrusted.

A batch read asks for consecutive entries at once. Bookies know it since BookKeeper 4.17 (BP-62).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from zlib import crc32

from google_crc32c import extend, value

from keyshard.broker.framing import CutFrame, ProtocolError
from keyshard.core.protobuf import NotProtobufError, fields_of, message

_VERSION, _READ, _BATCH_READ = 2, 2, 7
_HEADER = _VERSION << 24 | _READ << 16
_BATCH_HEADER = _VERSION << 24 | _BATCH_READ << 16
_REQUEST_HEAD, _ENTRY = struct.Struct(">IIq"), struct.Struct(">q")
_REQUEST_BYTES = _REQUEST_HEAD.size + _ENTRY.size
_BATCH_REQUEST = struct.Struct(">IIqqqiq")
_RESPONSE = struct.Struct(">Iiqq")
_BATCH_RESPONSE = struct.Struct(">Iiqqq")
_SIZE = struct.Struct(">I")
_BODY = struct.Struct(">qqqq")
_BODY_END = _RESPONSE.size + _BODY.size
_CRC32C, _CRC32 = struct.Struct(">I"), struct.Struct(">q")
_WHOLE = struct.Struct(">IiqqqqqqI")
"""Header, body and digest of an entry with a digest of type ``CRC32C``, before its stored bytes."""
RESPONSE_BYTES_MAX = 256 * 1024 * 1024
"""Largest response that is accepted, bytes."""
BATCH_BYTES = 512 * 1024
"""Bytes after which a bookie ends the response to a batch read; it has one entry at least."""
BAD_REQUEST, NOT_ADMITTED, TOO_MANY_REQUESTS = 100, 102, 106
REASONS = {
    1: "the ledger is missing",
    2: "the entry is missing",
    101: "the disk cannot be read",
    NOT_ADMITTED: "reads need TLS with a client certificate, or an authentication that keyshard "
    "does not offer to bookies",
    TOO_MANY_REQUESTS: "there are too many requests",
}
"""Meaning of a return code in the response of a bookie."""
_START_TLS, _TLS_STARTS, _NO_TLS = 9, 0, 404
_STARTING = message({1: message({1: 3, 2: _START_TLS, 3: 1}), 106: b""})
START_TLS = struct.pack(">I", len(_STARTING)) + _STARTING
"""Frame of a request that TLS begins after its answer."""
STARTED_BYTES_MAX = 1024
"""Largest answer to it that is accepted, bytes."""


def read_requests(ledger: int, entries: Iterable[int]) -> bytes:
    """Return the frames of plain reads of some entries."""
    head = _REQUEST_HEAD.pack(_REQUEST_BYTES - 4, _HEADER, ledger)
    return b"".join([head + number for number in map(_ENTRY.pack, entries)])


def batch_request(ledger: int, first: int, count: int) -> bytes:
    """Return the frame of a plain read of consecutive entries; ``first`` is the request's id."""
    size = _BATCH_REQUEST.size - 4
    return _BATCH_REQUEST.pack(size, _BATCH_HEADER, ledger, first, first, count, BATCH_BYTES)


def batch_of(frame: bytes) -> int | None:
    """Return the first entry of the batch read that a frame answers; ``None``: it answers none."""
    if frame[1:2] != b"\x07" or len(frame) < _BATCH_RESPONSE.size:
        return None
    first: int = _BATCH_RESPONSE.unpack_from(frame)[4]
    return first


def refusals(ledger: int, entries: Iterable[int], code: int) -> list[bytes]:
    """Return the responses of a bookie that refuses single reads with a code."""
    return [_RESPONSE.pack(_HEADER, code, ledger, entry) for entry in entries]


def split_batch(frame: bytes, ledger: int, first: int, end: int) -> tuple[int, list[bytes]]:
    """Split the response to a batch read into those to reads of its entries.

    Args:
        frame: The response, without its size.
        ledger: The ledger that was read.
        first: First entry that was requested.
        end: End of the requested entries, exclusive.

    Returns:
        The return code, and a response for each entry; none if the code is not 0.

    Raises:
        ProtocolError: It is not the answer to this read, or the sizes in it are wrong.
    """
    _, code, of_ledger, entry, _ = _BATCH_RESPONSE.unpack_from(frame)
    if of_ledger != ledger or entry != first:
        raise ProtocolError("a response to a request that was not sent")
    if code:
        return code, []
    responses: list[bytes] = []
    position, size = _BATCH_RESPONSE.size, len(frame)
    while position < size:
        start = position + _SIZE.size
        position = start + _SIZE.unpack_from(frame, position)[0] if start <= size else start
        if position > size or entry == end or type(frame) is CutFrame:
            raise ProtocolError(f"a response to a batch read with a wrong size, {size} bytes")
        responses.append(_RESPONSE.pack(_HEADER, 0, ledger, entry) + frame[start:position])
        entry += 1
    if not responses:
        raise ProtocolError("a response to a batch read without entries")
    return 0, responses


def check_tls_starts(frame: bytes) -> None:
    """Check the answer to :data:`START_TLS`, without its size.

    Raises:
        ProtocolError: The bookie does not begin TLS.
    """
    try:
        status = fields_of(frame).get(2)
    except (NotProtobufError, IndexError):
        status = None
    if status == _NO_TLS:
        raise ProtocolError("it is not set up for TLS")
    if status != _TLS_STARTS:
        raise ProtocolError(f"it does not begin TLS: error {status!r}")


def refuses_certificate(frame: bytes) -> bool:
    """Return whether a frame refuses the client certificate.

    If the handshake succeeds, but the authentication of the bookie does not admit the client, the
    bookie answers the request for TLS a second time, with an error.
    """
    return frame[:1] == _STARTING[:1]  # a tag of protobuf, which no frame of version 2 begins with


def right_at(frame: bytes, ledger: int) -> tuple[int, int] | None:
    """Return the entry in a frame and the offset of its stored bytes, if the frame is right.

    A right frame has an entry of the ledger, with a right digest of type ``CRC32C``. For other
    frames, :func:`answer_of` and :func:`stored_at` find the error. This function is their fast
    path: if entries are small, the fixed cost of a frame exceeds that of its digest.
    """
    if len(frame) < _WHOLE.size or type(frame) is CutFrame:
        return None
    header, code, asked, entry, of_ledger, number, _, _, digested = _WHOLE.unpack_from(frame)
    if (
        code
        or header >> 16 & 0xFF != _READ
        or not asked == of_ledger == ledger
        or entry != number
        or digested != _crc32c(frame)
    ):
        return None
    return entry, _WHOLE.size


def _crc32c(frame: bytes) -> int:
    """Compute the digest of the entry in a frame, of the bytes before and after the stored one."""
    # The library takes no views, only copies.
    right: int = extend(value(frame[_RESPONSE.size : _BODY_END]), frame[_WHOLE.size :])
    return right


def answer_of(frame: bytes, ledger: int) -> tuple[int, int]:
    """Return the entry that a frame, without its size, answers, and the return code.

    With return code 0, the frame has the entry.

    Raises:
        ProtocolError: It is not the answer to a read of the ledger.
    """
    if len(frame) < _RESPONSE.size:
        raise ProtocolError(f"a response of {len(frame)} bytes")
    header, code, of_ledger, entry = _RESPONSE.unpack_from(frame)
    if header >> 16 & 0xFF != _READ or of_ledger != ledger:
        raise ProtocolError("a response to a request that was not sent")
    return entry, code


def has_entry(frame: bytes) -> bool:
    """Return whether a frame, without its size, answers a single read with an entry."""
    return frame[1:2] == b"\x02" and frame[4:8] == b"\0\0\0\0"


def stored_at(frame: bytes, ledger: int, entry: int, digest: str) -> int:
    """Check the entry in a frame, and return the offset of its stored bytes.

    Args:
        frame: An answer with return code 0.
        ledger: The ledger that was read.
        entry: The entry that was requested.
        digest: Type of the digest, ``CRC32C`` or ``CRC32``.

    Raises:
        ProtocolError: The entry is another one, or its digest is wrong.
    """
    form = _CRC32C if digest == "CRC32C" else _CRC32
    position = _BODY_END + form.size
    if len(frame) < position or type(frame) is CutFrame:
        raise ProtocolError(f"an entry of {len(frame) - _RESPONSE.size} bytes")
    of_ledger, number, _, _ = _BODY.unpack_from(frame, _RESPONSE.size)
    if of_ledger != ledger or number != entry:
        raise ProtocolError(f"entry {of_ledger}:{number} instead of {ledger}:{entry}")
    (digested,) = form.unpack_from(frame, _BODY_END)
    if form is _CRC32C:
        right = _crc32c(frame)
    else:
        right = crc32(memoryview(frame)[position:], crc32(frame[_RESPONSE.size : _BODY_END]))
    if digested != right:
        raise ProtocolError("an entry with a wrong digest")
    return position
