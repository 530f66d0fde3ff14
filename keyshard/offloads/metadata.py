"""The metadata of a ledger that offloaders keep beside its entries."""

from __future__ import annotations

from keyshard.core.position.replicas import OffloadedLedger
from keyshard.core.protobuf import NotProtobufError, fields_of
from keyshard.offloads.layout import LayoutError

_LENGTH, _LAST_ENTRY, _STATE = 3, 4, 5
"""Fields of ``LedgerMetadataFormat`` (``DataFormats.proto`` of BookKeeper)."""
_CLOSED = 3


def check_metadata(metadata: bytes, ledger: OffloadedLedger) -> None:
    """Check that metadata describes a closed ledger, with the entries and bytes of ``ledger``.

    Args:
        metadata: ``LedgerMetadataFormat``, as the offloader wrote it.
        ledger: The ledger, as the broker lists it.

    Raises:
        LayoutError: It does not.
    """
    try:
        found = fields_of(metadata)
    except (NotProtobufError, IndexError):
        raise LayoutError("its metadata is no message of BookKeeper") from None
    state, last, length = (found.get(one) for one in (_STATE, _LAST_ENTRY, _LENGTH))
    if (state, last, length) != (_CLOSED, ledger.last, ledger.size_bytes):
        raise LayoutError(
            f"its metadata has state {state!r}, last entry {last!r} and {length!r} bytes, but the "
            f"ledger is closed with last entry {ledger.last} and {ledger.size_bytes} bytes"
        )
