"""The metadata of a ledger that offloaders keep beside its entries."""

from __future__ import annotations

from keyshard.core.protobuf import NotProtobufError, fields_of
from keyshard.offloads.layout import LayoutError

_LAST_ENTRY, _STATE = 4, 5
"""Fields of ``LedgerMetadataFormat`` (``DataFormats.proto`` of BookKeeper)."""
_CLOSED = 3


def check_metadata(metadata: bytes, last: int) -> None:
    """Check that a file is about a closed ledger of so many entries.

    Args:
        metadata: ``LedgerMetadataFormat``, as the offloader wrote it.
        last: Last entry of the ledger, as the broker lists it.

    Raises:
        LayoutError: It is not.
    """
    try:
        found = fields_of(metadata)
    except (NotProtobufError, IndexError):
        raise LayoutError("its metadata is no message of BookKeeper") from None
    state, found_last = found.get(_STATE), found.get(_LAST_ENTRY)
    if (state, found_last) != (_CLOSED, last):
        raise LayoutError(
            f"its metadata has state {state!r} and last entry {found_last!r}, but the ledger is "
            f"closed with last entry {last}"
        )
