"""JSON values, decoded by msgspec with the types of the schema, object by object.

docs/adr/0023 gives the reasons against Arrow's reader.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import pyarrow as pa

from keyshard.base_error import first_line
from keyshard.columns.avro_types import parse
from keyshard.columns.codec import ALL_DESCRIBED, AS_BYTES, UndecodableError, library, refused
from keyshard.columns.json_forms import Form, must_convert
from keyshard.columns.json_parts import Parts
from keyshard.columns.json_scalars import BARE_IN_JSON
from keyshard.columns.json_types import WRONG, Types, array_of, cast_array, formed_array
from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import SchemaError

_BARE_BYTES = BARE_IN_JSON.encode()
_FEW = 64
"""Most values that are searched for floats without quotes; more values are tried in parts."""
_TEXT_OR_BARE = re.compile(rb'"(?:[^"\\]|\\.)*"?|-?\b(?:NaN|Infinity)\b(?=\s*[],}])', re.DOTALL)
"""A string may lack its end, as in a truncated value. Without that, the search would begin again at
each quote in it, and take hours."""


class JsonCodec:
    """JSON objects of one schema. A missing field is null; an unknown field is ignored.

    Bytes are base64, as Pulsar's Java client writes them.

    Args:
        schema: Its definition is an Avro schema, as Pulsar writes it.
        topic: For errors.

    Raises:
        SchemaError: It is no Avro schema, or no column can hold its values.
        ConfigError: The package is not installed.
    """

    kind = "JSON"
    has_null = False
    undescribed = ALL_DESCRIBED

    def __init__(self, schema: TopicSchema, topic: str) -> None:
        msgspec = library("msgspec", f"The JSON schema of {topic}")
        self._wanted = parse(schema.definition, topic, unions=False, forms=True)
        self.type = self._wanted.column
        if not pa.types.is_struct(self.type):
            raise SchemaError(
                f"The JSON schema of {topic} is not a record.",
                AS_BYTES,
            )
        self._form = self._wanted.form or Form()
        plain = str(self.type).isascii()
        types, quoted = (Types(msgspec, plain=plain, quoted=one) for one in (False, True))
        try:
            self._read, self._read_quoted = self._decoder(types), self._decoder(quoted)
        except (ValueError, TypeError, RecursionError) as exc:
            raise SchemaError(
                f"The JSON schema of {topic} cannot be used ({first_line(exc)}).",
                AS_BYTES,
                topic=topic,
            ) from exc
        forms = self._form.fields
        self._converted = {
            one.name for one in self.type if must_convert(one.type, forms.get(one.name))
        }
        """Fields whose values Arrow may take without their form."""
        self._attributes = [attrgetter(f"f{number}") for number in range(len(list(self.type)))]
        self._made_plain = types.plain
        self._parts = Parts(quoted, self.type, self._form)

    def _decoder(self, types: Types) -> Callable[[bytes], Any]:
        forms = self._form.fields
        fields = [(one.name, types.of(one.type, forms.get(one.name))) for one in self.type]
        return types.decoder(types.struct(fields))

    def decode(
        self,
        values: pa.Array,
        keys: pa.Array,  # noqa: ARG002
        writer: TopicSchema | None,  # noqa: ARG002 - an object names its fields
    ) -> pa.Array:
        try:
            values.cast(pa.string())  # msgspec does not check ignored values and names
        except pa.ArrowInvalid as exc:
            raise UndecodableError("it is not UTF-8") from exc
        given = values.to_pylist()
        try:
            return self._decoded(given, self._read)
        except WRONG as exc:
            quoted = list(map(_bare_quoted, given)) if len(given) <= _FEW else given
            if quoted == given:
                raise UndecodableError(first_line(exc)) from exc
        try:
            return self._decoded(quoted, self._read_quoted)
        except WRONG as exc:
            raise UndecodableError(first_line(exc)) from exc

    def suspects(
        self,
        values: pa.Array,
        keys: pa.Array,  # noqa: ARG002
        writer: TopicSchema | None,  # noqa: ARG002
    ) -> Sequence[int]:
        return refused(values, self._look)

    def readable(
        self,
        values: pa.Array,
        keys: pa.Array,  # noqa: ARG002
        writer: TopicSchema | None,  # noqa: ARG002
    ) -> pa.Array:
        return self._parts.column(list(map(_bare_quoted, values.to_pylist())))

    def _look(self, value: bytes) -> None:
        value.decode()
        try:
            self._read(value)
        except WRONG:
            self._read_quoted(_bare_quoted(value))

    def _decoded(self, values: list[bytes], read: Callable[[bytes], Any]) -> pa.Array:
        rows = list(map(read, values))
        columns = [
            self._column(list(map(attribute, rows)), number, quoted=read is self._read_quoted)
            for number, attribute in enumerate(self._attributes)
        ]
        # Without columns, the number of rows would be lost.
        if not columns:
            return pa.array([{}] * len(rows), self.type)
        return pa.StructArray.from_arrays(columns, fields=list(self.type))

    def _column(self, values: list[Any], number: int, *, quoted: bool) -> pa.Array:
        """Make the column of a field of decoded values.

        Args:
            values: The values.
            number: Number of the field.
            quoted: Whether floats without quotes were quoted.

        Raises:
            ValueError: A value does not fit. The text names the field as msgspec does.
        """
        try:
            return self._column_of(values, number, quoted=quoted)
        except WRONG as exc:
            name = self.type.field(number).name
            raise ValueError(f"{first_line(exc)} - at `$.{name}`") from exc

    def _column_of(self, values: list[Any], number: int, *, quoted: bool) -> pa.Array:
        wanted = self._wanted
        stored, unit, field = (
            kind.field(number) for kind in (wanted.stored, wanted.unit, self.type)
        )
        if self._made_plain is not None:
            values = self._made_plain(values)
        form = self._form.fields.get(field.name)
        if form is not None and (quoted or field.name in self._converted):
            return cast_array(formed_array(values, field.type, form), field.type)
        if form is not None:
            try:
                # Values of other clients are as the schema says, and need no conversion.
                return cast_array(array_of(values, stored.type), unit.type, field.type)
            except (pa.ArrowException, TypeError, OverflowError):
                return cast_array(formed_array(values, field.type, form), field.type)
        return cast_array(array_of(values, stored.type), unit.type, field.type)


def _bare_quoted(value: bytes) -> bytes:
    return _TEXT_OR_BARE.sub(
        lambda found: (
            found[0] if found[0].startswith(b'"') else b'"%s%s"' % (_BARE_BYTES, found[0])
        ),
        value,
    )
