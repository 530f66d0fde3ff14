"""Requests about dead letters on the control socket, and dead letters as plain JSON values."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import fields
from datetime import date, datetime, time, timezone
from typing import Any, Protocol, TypedDict

from keyshard.config.connection import Connection
from keyshard.control import Handler
from keyshard.core.dead_letter import DeadLetter, position_of_text, position_text
from keyshard.core.dead_letter_filter import DeadLetterFilter, Plan
from keyshard.core.message import MessageId
from keyshard.core.option_checks import check_bool, check_integer, check_names
from keyshard.core.ring.key_slot import broker_text
from keyshard.core.topic_segments import received_topic_name
from keyshard.dead_letters.browser import Page, Stored
from keyshard.dead_letters.store import DeadLetterStore
from keyshard.errors import ConfigError, KeyShardError
from keyshard.redaction import shown

PAGE_MAX = 1_000
"""Maximum number of dead letters in one answer."""
VALUE_BYTES_MAX = 16 * 1024 * 1024
"""Maximum size of the content of a dead letter in an answer, bytes."""
DECODED_BYTES_MAX = 1024 * 1024
"""Largest value that is decoded by its schema, bytes."""
DECODED_CHARS_MAX = 1024 * 1024
"""Maximum number of characters of a decoded value in an answer."""


class RunningDeadLetters(Protocol):
    """The dead letters of a run; see :class:`~keyshard.handlers.failed_messages.FailedMessages`."""

    dead_letters: DeadLetterStore

    def unpark(self, wanted: DeadLetterFilter, *, dry_run: bool = False) -> Plan:
        """Unpark the keys of matching dead letters."""

    def discard(self, wanted: DeadLetterFilter, *, dry_run: bool = False) -> Plan:
        """Discard matching dead letters."""


class ListedDeadLetter(TypedDict):
    """A dead letter without its content."""

    kind: str
    topic: str
    partition: int
    messageId: str
    key: str | None
    error: str
    reason: str
    attempts: int
    ageSeconds: float
    bytes: int | None
    """Size of the value; ``None`` if it is stored in parts."""


class ListedPage(TypedDict):
    """One page of a list."""

    deadLetters: list[ListedDeadLetter]
    examined: int
    next: str | None


class DecodedValue(TypedDict):
    """The value of a dead letter, decoded by its schema; if that fails, the problem instead.

    A text that is too long is truncated, and has a problem, too.
    """

    type: str | None
    version: int | None
    text: str | None
    """JSON. Bytes are base64; times and decimals are texts."""
    problem: str | None


class ShownDeadLetter(ListedDeadLetter):
    """A dead letter with its content."""

    publishTime: str
    eventTime: str | None
    writtenAt: str | None
    orderingKey: str | None
    schemaVersion: int | None
    properties: dict[str, str]
    value: str | None
    """Base64 of the first 16 MiB."""
    decoded: DecodedValue | None
    """``None`` unless the request asks for it."""


def listed(dead_letter: DeadLetter, *, parts: bool) -> ListedDeadLetter:
    """Return a dead letter as JSON values, without its content."""
    message, written = dead_letter.message, dead_letter.written_at
    age = None if written is None else datetime.now(timezone.utc) - written
    return {
        "kind": dead_letter.kind.value,
        "topic": message.topic,
        "partition": message.partition,
        "messageId": str(message.message_id),
        "key": dead_letter.key,
        "error": dead_letter.error_kind,
        "reason": dead_letter.error,
        "attempts": dead_letter.attempts,
        "ageSeconds": 0.0 if age is None else round(max(0.0, age.total_seconds()), 1),
        "bytes": None if parts else len(message.value or b""),
    }


def listed_page(page: Page) -> ListedPage:
    """Return a page as JSON values."""

    def one(stored: Stored) -> ListedDeadLetter:
        return listed(stored.dead_letter, parts=bool(stored.parts))

    return {
        "deadLetters": [one(stored) for stored in page.dead_letters],
        "examined": page.examined,
        "next": None if page.next is None else position_text(page.next),
    }


def shown_dead_letter(dead_letter: DeadLetter) -> ShownDeadLetter:
    """Return a dead letter as JSON values, with its content."""
    message, value = dead_letter.message, dead_letter.message.value
    return {
        **listed(dead_letter, parts=False),
        "publishTime": message.publish_time.isoformat(),
        "eventTime": _time(message.event_time),
        "writtenAt": _time(dead_letter.written_at),
        "orderingKey": message.ordering_key,
        "schemaVersion": message.schema_version,
        "properties": dict(message.properties),
        "value": None if value is None else b64encode(value[:VALUE_BYTES_MAX]).decode(),
        "decoded": None,
    }


def decoded_value(connection: Connection, dead_letter: DeadLetter) -> DecodedValue:
    """Decode a value by the schema version of its message. An error becomes ``problem``.

    Args:
        connection: The cluster that has the schema.
        dead_letter: The dead letter, with its content.
    """
    from keyshard.reading.message_decoder import data_by_version  # noqa: PLC0415 - loads pyarrow

    size = len(dead_letter.message.value or b"")
    if size > DECODED_BYTES_MAX:
        return _undecoded(
            f"The value has {size:,} bytes, but only values of up to {DECODED_BYTES_MAX:,} bytes "
            "are decoded by their schema."
        )
    try:
        schema, value = data_by_version(connection, dead_letter.message)
        text = json.dumps(value, indent=2, ensure_ascii=False, default=_plain)
    except KeyShardError as exc:
        return _undecoded(exc.message)
    except (TypeError, ValueError, RecursionError) as exc:
        return _undecoded(f"The decoded value is no JSON: {shown(exc)}.")
    problem = None
    if len(text) > DECODED_CHARS_MAX:
        problem = f"Only the first {DECODED_CHARS_MAX:,} of {len(text):,} characters are shown."
        text = text[:DECODED_CHARS_MAX]
    return {"type": schema.type, "version": schema.version, "text": text, "problem": problem}


def _undecoded(why: str) -> DecodedValue:
    return {
        "type": None,
        "version": None,
        "text": None,
        "problem": f"{why} The other forms show its bytes.",
    }


def _plain(value: object) -> str:
    if isinstance(value, bytes):
        return b64encode(value).decode()
    return value.isoformat() if isinstance(value, (date, time)) else str(value)


def message_id_of(text: object) -> MessageId:
    """Parse ``ledger:entry`` or ``ledger:entry:index``.

    Raises:
        ConfigError: The text has another form.
    """
    parts = text.split(":") if isinstance(text, str) else []
    if len(parts) in (2, 3) and all(one.isdecimal() and one.isascii() for one in parts):
        ledger, entry, *index = (int(one[:20]) for one in parts)
        return MessageId(ledger, entry, index[0] if index else 0)
    raise ConfigError(
        f"The message id is {shown(text)}.",
        "Write ledger:entry:index as a list has it, such as 12:7:0.",
    )


def message_of(request: Mapping[str, Any]) -> tuple[str | None, int | None, MessageId]:
    """Return topic, partition and id of the message that a request names.

    Raises:
        ConfigError: A field has the wrong type or form.
    """
    topic, partition = request.get("topic"), request.get("partition")
    if topic is not None and not isinstance(topic, str):
        raise ConfigError(f"topic is {shown(topic)}.", "Write the name of a topic.")
    if partition is not None:
        check_integer("partition", partition, -1, 2**31 - 1)
    full_name = None if topic is None else received_topic_name(topic)
    return full_name, partition, message_id_of(request.get("id"))


class DeadLetterRequests:
    """Answers the requests of one run.

    Args:
        running: Returns its dead letters; raises ``NotRunningError`` during the start.
        connection: Its cluster, which has the schemas.
    """

    def __init__(self, running: Callable[[], RunningDeadLetters], connection: Connection) -> None:
        self._running = running
        self._connection = connection

    def handlers(self) -> dict[str, Handler]:
        """Return the functions that answer requests, by the names of the requests."""
        return {
            "dead_letters": self._list, "dead_letter": self._show, "unpark": self._unpark,
            "discard": self._discard,
        }  # fmt: skip

    def _list(self, request: Mapping[str, Any]) -> Any:
        limit, start = request.get("limit", PAGE_MAX), request.get("from")
        check_integer("limit", limit, 1, PAGE_MAX)
        try:
            position = None if start is None else position_of_text(str(start))
        except ValueError as exc:
            raise ConfigError(f"from is {shown(start)}.", "Give next of the page before.") from exc
        wanted = _filter_of(request, "limit", "from")
        return listed_page(self._running().dead_letters.browser.page(wanted, position, limit))

    def _show(self, request: Mapping[str, Any]) -> Any:
        topic, partition, message_id = message_of(request)
        found = self._running().dead_letters.browser.one(message_id, topic, partition)
        answer = shown_dead_letter(found)
        if request.get("schema") is True:
            answer["decoded"] = decoded_value(self._connection, found)
        return answer

    def _unpark(self, request: Mapping[str, Any]) -> Any:
        wanted = _filter_of(request, "all", "dry_run").checked(request.get("all", False))
        return _plan(self._running().unpark(wanted, dry_run=_is_dry_run(request)))

    def _discard(self, request: Mapping[str, Any]) -> Any:
        wanted = _filter_of(request, "all", "dry_run").checked(request.get("all", False))
        return _plan(self._running().discard(wanted, dry_run=_is_dry_run(request)))


def _is_dry_run(request: Mapping[str, Any]) -> bool:
    """Return whether a request changes nothing.

    Raises:
        ConfigError: ``dry_run`` is neither true nor false.
    """
    value: bool = request.get("dry_run", False)
    check_bool("dry_run", value)
    return value


def _filter_of(request: Mapping[str, Any], *others: str) -> DeadLetterFilter:
    """Return the filter of a request, with the key as the broker decodes it.

    Args:
        request: The request.
        others: Its fields that are no conditions.

    Raises:
        ConfigError: A condition is wrong, or a field is unknown: without it, more would match.
    """
    names = [one.name for one in fields(DeadLetterFilter)]
    check_names(f"The request {request.get('do')}", request, ["do", *others, *names])
    given = {name: request[name] for name in names if name in request}
    if isinstance(given.get("key"), str):
        given["key"] = broker_text(given["key"])
    return DeadLetterFilter(**given)


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        "keys": plan.keys,
        "deadLetters": plan.dead_letters,
        "matching": plan.matching,
        "first": [
            {"key": one.key, "deadLetters": one.dead_letters, "matching": one.matching}
            for one in plan.first
        ],
    }


def _time(time: datetime | None) -> str | None:
    return None if time is None else time.isoformat()
