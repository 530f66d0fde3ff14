"""Metadata columns: columns of rows that are made only on request (docs/adr/0026)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum

from keyshard.errors import ConfigError
from keyshard.redaction import shown

MESSAGE_ID_BYTES = "__messageIdBytes"
ORDERING_KEY, KEY_BYTES = "__orderingKey", "__keyBytes"
SEQUENCE_ID, PRODUCER, DELIVER_AT = "__sequenceId", "__producer", "__deliverAt"


class Kind(IntEnum):
    """Type of a column."""

    BYTES = 0
    TEXT = 1
    """Bytes that are not valid text are replaced."""
    NUMBER = 2
    """64 bits. From 2**63 on it is negative, as in Java."""
    TIME = 3
    """Milliseconds since the epoch; null if unset or invalid."""


class Origin(IntEnum):
    """Where the value of a column comes from."""

    ROW = 0
    """From the position or the content that every row has."""
    KEY = 1
    """From the partition key."""
    MESSAGE = 2
    """A field of each message."""
    ENTRY = 3
    """A field of the entry's metadata, the same for all of its messages."""
    BROKER = 4
    """A field that the broker adds to the entry."""


@dataclass(frozen=True, slots=True)
class MetadataColumn:
    """A metadata column. A field that is not set is null.

    Both decoders, and the columns of content, Spark and Ray, are derived from this definition.
    """

    name: str
    kind: Kind
    origin: Origin
    field: int = 0
    """Number of the field in ``MessageMetadata``, or ``BrokerEntryMetadata`` (``BROKER``)."""
    field_in_batch: int = 0
    """Number of the field in ``SingleMessageMetadata`` (``MESSAGE``)."""
    by_client: bool = False
    """Whether pulsar-client provides it."""

    @property
    def fixed(self) -> bool:
        """Whether each value takes 8 bytes."""
        return self.kind in (Kind.NUMBER, Kind.TIME)


COLUMNS = (
    # The message id as the Java client serializes it.
    MetadataColumn(MESSAGE_ID_BYTES, Kind.BYTES, Origin.ROW, by_client=True),
    MetadataColumn(ORDERING_KEY, Kind.TEXT, Origin.ROW, by_client=True),
    # The bytes that the partition key was set as; for a text key its UTF-8.
    MetadataColumn(KEY_BYTES, Kind.BYTES, Origin.KEY),
    # Null for a message of a producer batch without an id of its own: the id in the metadata of
    # the batch is not that of the message.
    MetadataColumn(SEQUENCE_ID, Kind.NUMBER, Origin.MESSAGE, field=2, field_in_batch=8),
    MetadataColumn(PRODUCER, Kind.TEXT, Origin.ENTRY, field=1, by_client=True),
    # Time of storage. Null if the broker adds none, or does not send it.
    MetadataColumn("__brokerPublishTime", Kind.TIME, Origin.BROKER, field=1),
    # The cluster that the message was replicated from. Null if it was not replicated.
    MetadataColumn("__replicatedFrom", Kind.TEXT, Origin.ENTRY, field=5),
    # Delivery time, for shared subscriptions. Null if the message is not delayed.
    MetadataColumn(DELIVER_AT, Kind.TIME, Origin.ENTRY, field=19),
)
"""All metadata columns, in their order in the rows of a source."""
STORED = tuple(one for one in COLUMNS if one.origin is not Origin.ROW)
"""Columns that are decoded from stored entries."""
METADATA_COLUMNS = tuple(one.name for one in COLUMNS)
NAME_KEY_BYTES = f"Set metadata_columns=['{KEY_BYTES}'] at the source."
"""Advice for errors about keys stored apart from values."""
NOT_BY_CLIENT = frozenset(one.name for one in COLUMNS if not one.by_client)
"""Columns that pulsar-client cannot provide: it does not expose the values."""
REFUSED = {
    "__redeliveryCount": "a replayed batch must have the same rows, but the stored entries have no "
    "redelivery count; a handler has message.redelivered",
    "__range": "the range of a key changes with the number of ranges, and a batch read has no "
    "ranges; select __slot, the position of the key in the ring",
}
"""Columns that do not exist, and the reason."""


def check_metadata_columns(name: str, given: object, *, by_client: bool) -> tuple[str, ...]:
    """Check names of metadata columns, and return them as a tuple.

    Args:
        name: Name of the option.
        given: One name or several.
        by_client: Whether pulsar-client consumes and reads.

    Raises:
        ConfigError: A column does not exist, is named twice, or is not available.
    """
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, Sequence) or not all(isinstance(one, str) for one in names):
        raise ConfigError(
            f"{name} is {shown(given)}.", f"Write a list of {', '.join(METADATA_COLUMNS)}."
        )
    for one in names:
        check_known(one)
        if one not in METADATA_COLUMNS:
            raise ConfigError(
                f"{name} contains {shown(one, 60)}, which is not a metadata column.",
                f"Choose from {', '.join(METADATA_COLUMNS)}. The default columns need no option.",
            )
    if len(set(names)) < len(names):
        raise ConfigError(
            f"{name} is {shown(given)}, which has a column twice.", "Name each column once."
        )
    check_transport(names, by_client=by_client)
    return tuple(names)


def check_known(name: object) -> None:
    """Refuse a column of :data:`REFUSED`. Other unknown names pass.

    Raises:
        ConfigError: The column is one of :data:`REFUSED`; the text gives the reason.
    """
    why = REFUSED.get(name) if isinstance(name, str) else None
    if why is not None:
        raise ConfigError(f"Column {name} does not exist: {why}.")


def check_transport(names: Collection[str], *, by_client: bool) -> None:
    """Refuse columns that pulsar-client does not provide.

    Raises:
        ConfigError: pulsar-client consumes and reads, and one of the columns needs another
            transport.
    """
    missing = [name for name in names if name in NOT_BY_CLIENT] if by_client else []
    if missing:
        raise ConfigError(
            f"Column {missing[0]} does not exist with transport 'client', because pulsar-client "
            "does not provide it.",
            "Leave transport out, or set it to 'wire'.",
        )


def refuse_for_handlers(names: Collection[str]) -> None:
    """Refuse columns if handlers receive the messages.

    Raises:
        ConfigError: A column is named that messages do not have.
    """
    if set(names) - {KEY_BYTES}:
        raise ConfigError(
            f"metadata_columns is {shown(list(names))}, but handlers receive messages. A message "
            f"has ordering_key, and with {KEY_BYTES} also key_bytes.",
            "Leave the other columns out, or read rows with batches() or open().",
        )
