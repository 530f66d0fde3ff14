"""One topic for each type of schema, written by the Java client, and the meaning of its values."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time, timezone
from decimal import Decimal
from functools import partial
from typing import Any

import httpx

from keyshard.core.position.entry import full_topic_name
from keyshard.testing.devbroker import DevBroker
from tests.support.java_client import JavaClient

UTC = timezone.utc
_Make = Callable[[Any], Any]
"""Something of Java, made of its package ``java``, its client's ``api``, or both."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of schema."""

    name: str
    schema: _Make
    """Java's schema; given a :class:`JavaClient`."""
    values: _Make
    """The arguments of Java's client, given its JVM, or the schema. A null value comes last."""
    wanted: Sequence[Any]
    """The same for a handler: scalars, or dicts."""
    columns: Mapping[str, str]
    """Columns of Spark, with their types."""
    projected: str = ""
    """A type that holds the values of several such types, for a schema of the user's."""
    encoded: bool = False
    """Whether py4j has no way to hand over a value: Java encodes it first."""
    by_text: Mapping[str, tuple[bytes, Any]] = field(default_factory=dict)
    """Further messages, with a key as text: their values as bytes, and the expected values."""
    registered: str = ""
    """Type that is registered beforehand; the others register themselves."""
    by_schema: bool = False
    """Whether values are made of the schema."""
    former: Sequence[tuple[_Make, _Make]] = ()
    """Schemas and values of earlier versions; their messages come first."""
    topic: str = field(default_factory=lambda: full_topic_name(f"matrix-{uuid.uuid4().hex}"))

    def data(self) -> list[Any]:
        """The data of all messages, for a handler."""
        # With the encoding SEPARATED, a message without a value is still a pair, as in Java.
        nothing = dict.fromkeys(self.columns) if "SEPARATED" in self.name else None
        return [*self.wanted, nothing, *self._by_text]

    def rows(self) -> list[dict[str, Any]]:
        """Decoded rows, as they are in Arrow."""
        rows = [one if isinstance(one, dict) else {"value": one} for one in self.wanted]
        return [*rows, dict.fromkeys(self.columns), *self._by_text]

    @property
    def _by_text(self) -> list[Any]:
        return [wanted for _, wanted in self.by_text.values()]

    def spark_rows(self, *, projected: bool) -> list[dict[str, Any]]:
        """The same in Spark. Spark has no type for a time of day."""
        cast = _CASTS.get((self.name, projected), lambda value: value)
        return [
            {name: None if one is None else cast(one) for name, one in row.items()}
            for row in self.rows()
        ]


def _us_of_day(at: time) -> int:
    return ((at.hour * 60 + at.minute) * 60 + at.second) * 1_000_000 + at.microsecond


_CASTS: dict[tuple[str, bool], Callable[[Any], Any]] = {
    ("LOCAL_TIME", False): _us_of_day,
    ("LOCAL_TIME", True): _us_of_day,
    ("LOCAL_DATE", True): lambda day: datetime.combine(day, time()),
}


def _named(name: str) -> _Make:
    return lambda java: getattr(java.api.Schema, name)


def _primitive(
    name: str, spark: str, projected: str, values: _Make, *wanted: Any, **how: Any
) -> Kind:
    schema = _named({"BOOLEAN": "BOOL", "NONE": "BYTES"}.get(name, name))
    return Kind(name, schema, values, wanted, {"value": spark}, projected, **how)


def _record(kind: str) -> _Make:
    def schema(java: JavaClient) -> Any:
        types = java.jvm.org.apache.pulsar.common.schema.SchemaType
        made = java.api.schema.SchemaBuilder.record("Money")
        for name, type_ in ("currency_code", types.STRING), ("units", types.INT64):
            made.field(name).type(type_)
        made.field("nanos").type(types.INT32)
        return java.api.Schema.generic(made.build(getattr(types, kind)))

    return schema


_MONEY = (
    {"currency_code": "né\n", "units": 2**63 - 1, "nanos": -5},
    {"currency_code": "", "units": -(2**40), "nanos": 0},
)
_MONEY_COLUMNS = {"currency_code": "string", "units": "bigint", "nanos": "int"}


def _records(schema: Any, rows: Sequence[Mapping[str, Any]] = _MONEY) -> list[Any]:
    found = []
    for one in rows:
        made = schema.newRecordBuilder()
        for name, value in one.items():
            made.set(name, value)
        found.append(made.build())
    return found


def _unions(*types: str) -> _Make:
    """A record with a union of types, and one of numbers."""
    fields = [{"name": "u", "type": types}, {"name": "n", "type": ["int", "long"]}]
    definition = json.dumps({"type": "record", "name": "R", "fields": fields})

    def schema(java: JavaClient) -> Any:
        made = java.api.schema.SchemaDefinition.builder().withJsonDef(definition).build()
        return java.api.Schema.generic(java.api.Schema.AVRO(made).getSchemaInfo())

    return schema


_UNITED = {"u": -5, "n": 2**40}, {"u": 2**40, "n": 1}, {"u": True, "n": 1}


def _member(place: int, value: Any) -> dict[str, Any]:
    return dict.fromkeys(f"member{number}" for number in range(4)) | {f"member{place}": value}


def _messages(jvm: Any) -> list[Any]:
    builders = [jvm.com.google.type.Money.newBuilder() for _ in _MONEY]
    return [
        made.setCurrencyCode(one["currency_code"]).setUnits(one["units"]).setNanos(one["nanos"])
        .build()
        for made, one in zip(builders, _MONEY, strict=True)
    ]  # fmt: skip


def _protobuf(kind: str, message: str) -> _Make:
    """The schema of a message that Java's libraries have."""

    def schema(java: JavaClient) -> Any:
        return getattr(java.api.Schema, kind)(java.jvm.java.lang.Class.forName(message))

    return schema


_PROTO = "com.google.protobuf"
_LOCATIONS = (
    {
        "path": [4, -1, 2**31 - 1], "span": [], "leading_comments": "né",
        "trailing_comments": "", "leading_detached_comments": ["", "a"],
    },
    {
        "path": [], "span": [0], "leading_comments": "", "trailing_comments": "x",
        "leading_detached_comments": [],
    },
)  # fmt: skip
"""The type of a proto2 message with packed numbers."""


def _locations(jvm: Any) -> list[Any]:
    found = []
    for one in _LOCATIONS:
        made = jvm.com.google.protobuf.DescriptorProtos.SourceCodeInfo.Location.newBuilder()
        for name in "path", "span", "leading_detached_comments":
            for item in one[name]:
                getattr(made, "add" + _camel(name))(item)
        for name in "leading_comments", "trailing_comments":
            if one[name]:
                getattr(made, "set" + _camel(name))(one[name])
        found.append(made.build())
    return found


def _camel(name: str) -> str:
    return name.title().replace("_", "")


def _labels(jvm: Any) -> list[Any]:
    message = jvm.com.google.api.LabelDescriptor
    number = message.ValueType.INT64
    return [
        message.newBuilder().setKey("k").setValueType(number).setDescription("d").build(),
        message.newBuilder().build(),
    ]


def _pair(encoding: str) -> Kind:
    def schema(java: JavaClient) -> Any:
        encodings = java.jvm.org.apache.pulsar.common.schema.KeyValueEncodingType
        api = java.api.Schema
        return api.KeyValue(api.INT32, api.LOCAL_DATE, getattr(encodings, encoding))

    def values(jvm: Any) -> list[Any]:
        pair, day = jvm.org.apache.pulsar.common.schema.KeyValue, jvm.java.time.LocalDate
        return [pair(-7, day.of(2024, 1, 1)), pair(8, None)]

    wanted = {"key": -7, "value": date(2024, 1, 1)}, {"key": 8, "value": None}
    name = f"KEY_VALUE {encoding}"
    # The same four bytes, as Java reads them; as base64 the text would be three others.
    day = {"abcd": (bytes(8), {"key": 0x61626364, "value": date(1970, 1, 1)})}
    by_text = day if encoding == "SEPARATED" else {}
    return Kind(name, schema, values, wanted, {"key": "int", "value": "date"}, by_text=by_text)


_AT = 1_700_000_000_123
_TIMES = (
    datetime(2023, 11, 14, 22, 13, 20, 123_000, UTC),
    datetime(1969, 12, 31, 23, 59, 59, 999_000, UTC),
)
_BOOLEANS = True, False
_LAST_NS = 999_999_999
KINDS = (
    _primitive("BYTES", "binary", "", lambda _: [b"\xff\0", b""], b"\xff\0", b""),
    _primitive("NONE", "binary", "", lambda _: [b"x"], b"x", registered="BYTES"),
    _primitive("STRING", "string", "", lambda _: ["né", ""], "né", ""),
    _primitive("BOOLEAN", "boolean", "", lambda _: list(_BOOLEANS), *_BOOLEANS),
    _primitive("INT8", "tinyint", "bigint", lambda _: [-128, 127], -128, 127, encoded=True),
    _primitive("INT16", "smallint", "bigint", lambda _: [258, -2], 258, -2, encoded=True),
    _primitive("INT32", "int", "bigint", lambda _: [-(2**31), 7], -(2**31), 7),
    _primitive(
        "INT64", "bigint", "bigint", lambda _: [-(2**63), 2**63 - 1], -(2**63), 2**63 - 1
    ),
    _primitive("FLOAT", "float", "double", lambda _: [1.5, -0.25], 1.5, -0.25, encoded=True),
    _primitive("DOUBLE", "double", "double", lambda _: [-0.1, 1e308], -0.1, 1e308),
    _primitive(
        "DATE", "timestamp", "",
        lambda jvm: [jvm.java.util.Date(_AT), jvm.java.util.Date(-1)], *_TIMES,
    ),
    _primitive(
        "TIME", "timestamp", "", lambda jvm: [jvm.java.sql.Time(_AT), jvm.java.sql.Time(-1)],
        *_TIMES,
    ),
    _primitive(
        "TIMESTAMP", "timestamp", "",
        lambda jvm: [jvm.java.sql.Timestamp(_AT), jvm.java.sql.Timestamp(-1)], *_TIMES,
    ),
    _primitive(
        "INSTANT", "timestamp", "",
        lambda jvm: [
            jvm.java.time.Instant.ofEpochSecond(1_700_000_000, 123_456_789),
            jvm.java.time.Instant.ofEpochSecond(-1, _LAST_NS),
        ],
        _TIMES[0].replace(microsecond=123_456), _TIMES[1].replace(microsecond=999_999),
    ),
    _primitive(
        "LOCAL_DATE", "date", "timestamp_ntz",
        lambda jvm: [jvm.java.time.LocalDate.of(2024, 2, 29), jvm.java.time.LocalDate.of(1, 1, 1)],
        date(2024, 2, 29), date(1, 1, 1),
    ),
    _primitive(
        "LOCAL_TIME", "bigint", "bigint",
        lambda jvm: [
            jvm.java.time.LocalTime.of(1, 2, 3, 4_999),
            jvm.java.time.LocalTime.of(23, 59, 59, _LAST_NS),
        ],
        time(1, 2, 3, 4), time(23, 59, 59, 999_999),
    ),
    _primitive(
        "LOCAL_DATE_TIME", "timestamp_ntz", "timestamp_ntz",
        lambda jvm: [
            jvm.java.time.LocalDateTime.of(2024, 2, 29, 1, 2, 3, 4_999),
            jvm.java.time.LocalDateTime.of(1, 1, 1, 23, 59, 59, _LAST_NS),
        ],
        datetime.fromisoformat("2024-02-29T01:02:03.000004"),
        datetime.fromisoformat("0001-01-01T23:59:59.999999"),
    ),
    Kind("AVRO", _record("AVRO"), _records, _MONEY, _MONEY_COLUMNS, by_schema=True),
    Kind("JSON", _record("JSON"), _records, _MONEY, _MONEY_COLUMNS, by_schema=True),
    Kind(
        "AVRO with unions", _unions("long", "null", "int", "string", "boolean"),
        partial(_records, rows=_UNITED),
        [
            {"u": _member(1, 5), "n": 7}, {"u": _member(2, "né"), "n": 7}, {"u": None, "n": 7},
            {"u": _member(1, -5), "n": 2**40}, {"u": _member(0, 2**40), "n": 1},
            {"u": _member(3, _BOOLEANS[0]), "n": 1},
        ],
        {
            "u": "struct<member0:bigint,member1:int,member2:string,member3:boolean>",
            "n": "bigint",
        },
        by_schema=True,
        former=[
            (
                _unions("null", "int", "string", "boolean", "long"),
                partial(_records, rows=[{"u": one, "n": 7} for one in (5, "né", None)]),
            )
        ],
    ),
    Kind(
        "PROTOBUF_NATIVE", _protobuf("PROTOBUF_NATIVE", "com.google.type.Money"), _messages,
        _MONEY, _MONEY_COLUMNS,
    ),
    Kind(
        "PROTOBUF", _protobuf("PROTOBUF", "com.google.type.Money"), _messages, _MONEY,
        _MONEY_COLUMNS,
    ),
    Kind(
        "PROTOBUF of proto2",
        _protobuf("PROTOBUF", f"{_PROTO}.DescriptorProtos$SourceCodeInfo$Location"), _locations,
        _LOCATIONS,
        {
            "path": "array<int>", "span": "array<int>", "leading_comments": "string",
            "trailing_comments": "string", "leading_detached_comments": "array<string>",
        },
    ),
    Kind(
        "PROTOBUF of two versions", _protobuf("PROTOBUF", f"{_PROTO}.UInt64Value"),
        lambda jvm: [jvm.com.google.protobuf.UInt64Value.of(-1)],
        tuple({"value": Decimal(one)} for one in (2**32 - 1, 0, 2**64 - 1)),
        {"value": "decimal(20,0)"},
        former=[
            (
                _protobuf("PROTOBUF", f"{_PROTO}.UInt32Value"),
                lambda jvm: [jvm.com.google.protobuf.UInt32Value.of(one) for one in (-1, 0)],
            )
        ],
    ),
    _pair("INLINE"),
    _pair("SEPARATED"),
)  # fmt: skip
"""All that can be columns, each with a topic of its own."""
LABELS = Kind(
    "PROTOBUF with an enumeration", _protobuf("PROTOBUF", "com.google.api.LabelDescriptor"),
    _labels, [{"key": "k", "description": "d"}, {"key": "", "description": ""}],
    {"key": "string", "description": "string"},
)  # fmt: skip
"""The schema without a field that has no numbers."""


def write(java: JavaClient, broker: DevBroker, kinds: Sequence[Kind]) -> None:
    """Publish the values of types, and a null after them; each producer registers its schema."""
    for kind in kinds:
        if kind.registered:
            add_schema(broker, kind.topic, kind.registered)
        for former, former_values in kind.former:
            former_schema = former(java)
            producer = java.client.newProducer(former_schema).topic(kind.topic).create()
            for value in former_values(former_schema if kind.by_schema else java.jvm):
                _message(producer, kind).value(value).send()
            producer.close()
        schema = kind.schema(java)
        values = kind.values(schema if kind.by_schema else java.jvm)
        if kind.encoded:
            values = [schema.encode(value) for value in values]
            schema = java.api.Schema.AUTO_PRODUCE_BYTES(schema)
        producer = java.client.newProducer(schema).topic(kind.topic).create()
        for value in values:
            _message(producer, kind).value(value).send()
        _message(producer, kind).send()
        producer.close()
        if kind.by_text:
            producer = java.client.newProducer(java.api.Schema.BYTES).topic(kind.topic).create()
            for key, (value, _) in kind.by_text.items():
                producer.newMessage().key(key).value(value).send()
            producer.close()


def _message(producer: Any, kind: Kind) -> Any:
    made = producer.newMessage()
    return made if "SEPARATED" in kind.name else made.key("k")


def add_schema(
    broker: DevBroker, topic: str, kind: str, definition: str = "", **properties: str
) -> None:
    """Register the next version of a schema as administrators do."""
    body = {"type": kind, "schema": definition, "properties": properties}
    httpx.post(schema_url(broker, topic), json=body).raise_for_status()


def schema_url(broker: DevBroker, topic: str) -> str:
    """Return the URL of the schema of a topic at the admin interface."""
    path = full_topic_name(topic).partition("://")[2]
    return f"{broker.admin_url}/admin/v2/schemas/{path}/schema"
