"""Columns beside the default ones, made only where somebody names them (docs/adr/0026)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from keyshard.errors import ConfigError
from keyshard.redaction import shown

MESSAGE_ID_BYTES = "__messageIdBytes"
ORDERING_KEY, KEY_BYTES = "__orderingKey", "__keyBytes"
SEQUENCE_ID, PRODUCER = "__sequenceId", "__producer"
BROKER_PUBLISH_TIME = "__brokerPublishTime"
METADATA_COLUMNS = (
    MESSAGE_ID_BYTES, ORDERING_KEY, KEY_BYTES, SEQUENCE_ID, PRODUCER, BROKER_PUBLISH_TIME,
)  # fmt: skip
"""What each holds:

- ``__messageIdBytes``: the message id as the Java client stores it.
- ``__orderingKey``: the ordering key; null without one.
- ``__keyBytes``: the bytes that a partition key was set as, of a text its UTF-8; null when keyless.
- ``__sequenceId``: the producer's number of the message; null where the producer says none for a
  message of a batch, since the number of the batch is not its own. From 2**63 on it is negative, as
  with Java.
- ``__producer``: the name of the producer.
- ``__brokerPublishTime``: when the broker stored it, by the broker's clock; null where the broker
  adds none, or does not hand it out.
"""
NAME_KEY_BYTES = f"give the source metadata_columns=['{KEY_BYTES}']."
"""What to do where keys stand apart from values, as an error says it."""
NOT_BY_CLIENT = frozenset({KEY_BYTES, SEQUENCE_ID, BROKER_PUBLISH_TIME})
"""What pulsar-client knows and does not hand out."""
REFUSED = {
    "__redeliveryCount": "what is read again after a restart comes from the log, which counts no "
    "deliveries, and a batch that is run again must have the same rows; a handler has "
    "message.redelivered",
    "__range": "it is no property of a message: which range has a key changes with the number of "
    "ranges, and a batch read has none; select __slot, where the key lies on the ring",
}
"""Columns that are none, and why."""


def check_metadata_columns(name: str, given: object, *, by_client: bool) -> tuple[str, ...]:
    """Names of columns beside the default ones.

    Args:
        name: What the user calls them.
        given: One name or several.
        by_client: Whether pulsar-client consumes and reads.

    Raises:
        ConfigError: One is no such column, is named twice, or cannot be had.
    """
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, Sequence) or not all(isinstance(one, str) for one in names):
        raise ConfigError(
            f"{name} is {shown(given)}; give a list of {', '.join(METADATA_COLUMNS)}."
        )
    for one in names:
        check_known(one)
        if one not in METADATA_COLUMNS:
            raise ConfigError(
                f"{name} names {shown(one, 60)}; it may name {', '.join(METADATA_COLUMNS)}. "
                "Others are there without."
            )
    if len(set(names)) < len(names):
        raise ConfigError(f"{name} is {shown(given)}, which has a column twice. Name each once.")
    check_transport(names, by_client=by_client)
    return tuple(names)


def check_known(name: object) -> None:
    """Refuse a column that there cannot be.

    Raises:
        ConfigError: It is one of :data:`REFUSED`; says why.
    """
    why = REFUSED.get(name) if isinstance(name, str) else None
    if why is not None:
        raise ConfigError(f"There is no column {name}: {why}.")


def check_transport(names: Collection[str], *, by_client: bool) -> None:
    """Refuse what pulsar-client does not hand out.

    Raises:
        ConfigError: It consumes and reads, and one of the columns is such.
    """
    missing = [name for name in names if name in NOT_BY_CLIENT] if by_client else []
    if missing:
        raise ConfigError(
            f"Column {missing[0]} is not to be had with transport 'client': pulsar-client does not "
            "hand it out. Leave transport out, or use 'wire'."
        )


def refuse_for_handlers(names: Collection[str]) -> None:
    """Refuse columns where handlers get messages.

    Raises:
        ConfigError: There are some that no message has.
    """
    if set(names) - {KEY_BYTES}:
        raise ConfigError(
            f"metadata_columns is {shown(list(names))}, and handlers get messages, which have "
            f"ordering_key, and of the others only {KEY_BYTES}, as key_bytes. Leave the others "
            "out, or take rows: batches() or open()."
        )
