"""Kinds of values: their schemas, messages and expected rows."""

from __future__ import annotations

import io
import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fastavro
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

AVRO, JSON, PROTOBUF = "AVRO", "JSON", "PROTOBUF_NATIVE"
INLINE, SEPARATED, TEXT, NONE = "INLINE", "SEPARATED", "STRING", "NONE"
KINDS = (AVRO, JSON, PROTOBUF, INLINE, SEPARATED, TEXT, NONE)
RECORDS = (AVRO, JSON, PROTOBUF)
BAD = -1
"""Stands for the version that no other can be read as."""
DEFAULT = 7
_MALFORMED = {
    AVRO: b"\x01", JSON: b"{", PROTOBUF: b"\xff", INLINE: b"\x01", SEPARATED: b"\xff",
    TEXT: b"\xff\xfe",
}  # fmt: skip
_FIELDS: tuple[dict[str, Any], ...] = (
    {"name": "id", "type": "long"},
    {"name": "name", "type": ["null", "string"], "default": None},
    {"name": "more", "type": "int", "default": DEFAULT},
)


@dataclass(frozen=True, slots=True)
class Schema:
    """The registered schema of one version."""

    type: str
    definition: str = ""
    properties: Mapping[str, str] | None = None

    def body(self) -> dict[str, Any]:
        """The schema in the form of the admin interface."""
        return {
            "type": self.type,
            "schema": self.definition,
            "properties": dict(self.properties or {}),
        }


@dataclass(frozen=True, slots=True)
class Sent:
    """One message that was handed to the broker."""

    number: int
    """Its unique property ``n``."""
    topic: str
    partition: int
    entry: int
    """Number of its producer batch."""
    key: str | bytes | None
    ordering_key: str | None
    kind: str
    version: int
    """The schema version of its value: 0, 1 or :data:`BAD`."""
    tombstone: bool
    corrupt: bool
    payload: bytes | None
    confirmed: bool

    @property
    def routing_key(self) -> str | bytes | None:
        """The key by which the broker routes it."""
        return self.key if self.ordering_key is None else self.ordering_key

    @property
    def may_be_malformed(self) -> bool:
        """Whether a query of some version cannot decode it."""
        return self.corrupt or self.version == BAD

    @property
    def name(self) -> str | None:
        """Its field ``name``, or its text."""
        return _name(self.number)


def _name(number: int) -> str | None:
    return None if number % 11 == 0 else f"né{number}"


def schema_of(kind: str, version: int) -> Schema | None:
    """The registered schema; ``None`` for a topic without one."""
    if kind in (AVRO, JSON):
        return Schema(kind, json.dumps(_avro(version)))
    if kind == PROTOBUF:
        file = _file(version)
        files = descriptor_pb2.FileDescriptorSet(file=[file])
        output = {
            "fileDescriptorSet": b64encode(files.SerializeToString()).decode(),
            "rootMessageTypeName": "d.R",
            "rootFileDescriptorName": file.name,
        }
        return Schema(kind, json.dumps(output))
    if kind in (INLINE, SEPARATED):
        properties = {"kv.encoding.type": kind}
        for part in ("key", "value"):
            output = {"name": part, "type": "STRING", "properties": "{}"}
            properties |= {f"{part}.schema.{name}": text for name, text in output.items()}
        return Schema("KEY_VALUE", '{"key": "", "value": ""}', properties)
    return Schema(TEXT) if kind == TEXT else None


def other_schema() -> Schema:
    """Return the schema of another record, with values whose bytes fit the first version."""
    fields = [
        {"name": "number", "type": "long"},
        {"name": "text", "type": ["null", "string"], "default": None},
    ]
    return Schema(AVRO, json.dumps({"type": "record", "name": "R", "fields": fields}))


def _avro(version: int) -> dict[str, Any]:
    fields: Sequence[dict[str, Any]] = _FIELDS[:2] if version == 0 else _FIELDS
    if version == BAD:
        fields = [{"name": "id", "type": "string"}, *_FIELDS[1:2]]
    return {"type": "record", "name": "R", "fields": list(fields)}


def _file(version: int) -> descriptor_pb2.FileDescriptorProto:
    kind = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name=f"r{version}.proto", package="d", syntax="proto3"
    )
    made = file.message_type.add(name="R")
    types = (("id", kind.TYPE_INT64), ("name", kind.TYPE_STRING), ("more", kind.TYPE_INT32))
    for number, (name, type_) in enumerate(types[: 2 + version], 1):
        made.field.add(name=name, number=number, type=type_, label=kind.LABEL_OPTIONAL)
    return file


def _pool(version: int) -> Any:
    pool = descriptor_pool.DescriptorPool()
    pool.Add(_file(version))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("d.R"))


_MESSAGES = {version: _pool(version) for version in (0, 1)}


def malformed(kind: str, number: int) -> bytes:
    """Bytes that no version can be; of a JSON object, the field ``name`` can be read.

    Args:
        kind: The kind of value.
        number: The number of its message.
    """
    if kind == JSON and number % 2:
        return json.dumps({"id": [], "name": _name(number)}).encode()
    return _MALFORMED[kind]


def encoded(
    kind: str, version: int, number: int, name: str | None, key: str | bytes | None
) -> bytes:
    """The value of a message."""
    row: dict[str, Any] = {"id": f"s{number}" if version == BAD else number, "name": name}
    if version == 1:
        row["more"] = number % 1_000
    if kind == AVRO:
        data = io.BytesIO()
        fastavro.schemaless_writer(data, fastavro.parse_schema(_avro(version)), row)
        return data.getvalue()
    if kind == JSON:
        return json.dumps(row).encode()
    if kind == PROTOBUF:
        given = {field: value for field, value in row.items() if value is not None}
        data_: bytes = _MESSAGES[version](**given).SerializeToString()
        return data_
    text = f"v{number}".encode()
    if kind == INLINE:
        of_key = key.encode() if isinstance(key, str) else b"bytes"
        parts = (len(of_key).to_bytes(4, "big") + of_key, len(text).to_bytes(4, "big") + text)
        return b"".join(parts)
    return text


def wrong(sent: Sent, row: Mapping[str, Any], mode: str, *, any_malformed: bool = False) -> str:  # noqa: PLR0911 - a table in words
    """The error of a row; empty if none.

    Args:
        sent: The published message.
        row: Columns by name; bytes as ``{"hex": ...}``.
        mode: Of the query.
        any_malformed: Whether the query may be of a version that this one cannot be read as.
    """
    corrupt = _bytes(row.get("_corrupt_record"))
    if corrupt is not None or (sent.corrupt and sent.kind != NONE):
        if mode == "PERMISSIVE" and "_corrupt_record" not in row:
            return ""  # the columns that were asked for do not tell
        if mode != "PERMISSIVE" or not (sent.may_be_malformed or any_malformed):
            return f"a row that should be malformed {sent.corrupt}, in mode {mode}"
        if corrupt != sent.payload:
            return f"the corrupt bytes are {corrupt!r}"
        if sent.kind == JSON and sent.corrupt:
            is_object = corrupt != _MALFORMED[JSON]
            name = sent.name if is_object else None
            return _differs(row, "id", None) or _differs(row, "name", name)
        return ""
    if sent.kind == NONE:
        return _differs(row, "value", sent.payload)
    if sent.kind in (TEXT, INLINE, SEPARATED):
        wanted = None if sent.tombstone else f"v{sent.number}"
        output = _differs(row, "value", wanted)
        if sent.kind == SEPARATED:
            output = output or _differs(row, "key", sent.key)
        if sent.kind == INLINE and not sent.tombstone:
            output = output or _differs(
                row, "key", sent.key if isinstance(sent.key, str) else "bytes"
            )
        return output
    if sent.tombstone:
        return _differs(row, "id", None) or _differs(row, "name", None)
    identity: Any = f"s{sent.number}" if sent.version == BAD else sent.number
    name = (sent.name or "") if sent.kind == PROTOBUF else sent.name
    output = _differs(row, "id", identity) or _differs(row, "name", name)
    if not output and "more" in row:
        allowed = [sent.number % 1_000] if sent.version == 1 else [DEFAULT, None, 0]
        if row["more"] not in allowed:
            output = f"more is {row['more']}, not one of {allowed}"
    return output


def _differs(row: Mapping[str, Any], name: str, wanted: Any) -> str:
    if name not in row:
        return ""
    found = row[name]
    found = _bytes(found) if isinstance(found, dict) else found
    return "" if found == wanted else f"{name} is {found!r}, not {wanted!r}"


def _bytes(found: Any) -> bytes | None:
    return bytes.fromhex(found["hex"]) if isinstance(found, dict) and "hex" in found else None
