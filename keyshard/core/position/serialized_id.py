"""Message ids as Pulsar's clients serialize them: ``MessageIdData`` of its protocol.

Equal, byte for byte, to ``MessageId.toByteArray()`` of the Java client. Its JSON form is a list of
signed bytes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from keyshard.core.protobuf import fields_of, message, varint

_LEDGER, _ENTRY, _PARTITION, _BATCH_INDEX, _BATCH_SIZE, _FIRST_CHUNK = 1, 2, 3, 4, 6, 7
BYTES_MAX = 1_024
"""Most bytes that are parsed. An id has 4 to 60, plus the name of a topic in newer clients."""
_END = 2**63 - 1
_KEPT = 10_000
"""Size of the caches. Messages share parts of their ids."""


class SerializedId(NamedTuple):
    """The fields of an id. The Java client's ``earliest`` and ``latest`` are ids, too."""

    ledger: int
    entry: int
    partition: int = -1
    batch_index: int = -1
    """-1 if the entry is no producer batch."""
    batch_size: int = 0

    @property
    def earliest(self) -> bool:
        """Whether the id means the beginning of the stored data."""
        return self[:2] == (-1, -1)

    @property
    def latest(self) -> bool:
        """Whether the id means the end of the stored data."""
        return self[:2] == (_END, _END)

    def to_bytes(self) -> bytes:
        """Serialize the id."""
        index = b"" if self.batch_index < 0 else batch_index_bytes(self.batch_index)
        entry = entry_bytes(self.ledger, self.entry, self.partition)
        return entry + index + batch_size_bytes(self.batch_size)

    @classmethod
    def from_bytes(cls, data: bytes) -> SerializedId:
        """Parse the bytes of any client.

        Raises:
            ValueError: The bytes are no message id, or that of a chunked message; the text says
                why.
        """
        try:
            found = fields_of(data) if len(data) <= BYTES_MAX else {}
        except (ValueError, IndexError):
            found = {}
        if _FIRST_CHUNK in found:
            raise ValueError("it belongs to a chunked message, which keyshard does not support")
        plain = {number: one for number, one in found.items() if isinstance(one, int)}
        if not plain.keys() >= {_LEDGER, _ENTRY}:
            raise ValueError("it is not a message id")
        numbers = (_LEDGER, _ENTRY, _PARTITION, _BATCH_INDEX, _BATCH_SIZE)
        ledger, entry, partition, index, size = (
            _signed(plain.get(number, default))
            for number, default in zip(numbers, (0, 0, -1, -1, 0), strict=True)
        )
        return cls(ledger, entry, partition, index, size)


def entry_bytes(ledger: int, entry: int, partition: int) -> bytes:
    """Return the first part of an id, which all messages of an entry share."""
    before, after = _around(ledger, partition)
    return before + varint(entry % 2**64) + after


@lru_cache(_KEPT)
def _around(ledger: int, partition: int) -> tuple[bytes, bytes]:
    """Return the bytes before and after the entry number."""
    after = b"" if partition < 0 else message({_PARTITION: partition})
    return message({_LEDGER: ledger % 2**64}) + varint(_ENTRY << 3), after


@lru_cache(_KEPT)
def batch_index_bytes(index: int) -> bytes:
    """Return the second part; empty if the entry is no producer batch."""
    return message({_BATCH_INDEX: index})


@lru_cache(_KEPT)
def batch_size_bytes(size: int) -> bytes:
    """Return the last part; the size is 0 if the entry is no producer batch."""
    return message({_BATCH_SIZE: size})


def _signed(value: int) -> int:
    """Return a 64-bit number in Java's signed form."""
    value %= 2**64
    return value - 2**64 if value > _END else value
