"""Decodes rows: raw columns in, decoded columns out.

The plan of the query fixes the schema of each topic and the columns. Messages may be written with
other versions of a schema. A process asks for each version once, because a version never changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyarrow import compute

from keyshard.broker.schemas import schema_of
from keyshard.columns.codec import Codec, decode_rows
from keyshard.columns.codecs import KEY_VALUE, codec_of, keys_apart
from keyshard.columns.projection import cast, check, columns_of
from keyshard.config.connection import Connection
from keyshard.config.source import DROPMALFORMED, FAILFAST, PERMISSIVE
from keyshard.core.metadata_columns import KEY_BYTES, NAME_KEY_BYTES
from keyshard.core.topic_schema import TopicSchema
from keyshard.core.topic_segments import scalable_topic_of
from keyshard.errors import MalformedMessageError, SchemaError
from keyshard.reading.decoding_plan import (
    CORRUPT,
    METADATA,
    RAW,
    WITHOUT_SCHEMA,
    Decoding,
)

VERSIONS_MAX = 1_000
"""Schemas of other versions that a process keeps. A stream has a new plan for each new ledger."""
_other_versions: dict[tuple[str, str, int], TopicSchema] = {}
"""By plan name, topic and version; one table per process."""


class RowDecoder:
    """Decodes rows by a plan.

    Args:
        plan: The plan of the query.
        output: Columns of the decoded rows, in their order.

    Raises:
        SchemaError: A column does not exist, or a cast would lose information.
    """

    def __init__(self, plan: Decoding, output: pa.Schema) -> None:
        self._plan = plan
        self._output = output
        self._codecs: dict[str, tuple[TopicSchema, Codec, pa.Schema | None]] = {}
        """With the columns that values are cast to; ``None`` if bytes are wanted."""
        self._unfit: dict[str, str] = {}
        """Topics that were found later and do not have the columns, and why."""
        self._payload = pa.schema([one for one in output if one.name not in {*METADATA, CORRUPT}])
        shows_corrupt = plan.mode == PERMISSIVE and CORRUPT in output.names
        # The choice of columns must not change the rows.
        drops = plan.mode == DROPMALFORMED
        self._needs_values = bool(len(self._payload)) or shows_corrupt or drops
        for topic in plan.schemas:
            self._codec(topic)
        self.decodes = self._needs_values and any(
            payload is not None for _, _, payload in self._codecs.values()
        )
        """Whether any row depends on a schema."""
        self.malformed = 0
        """Rows that do not fit the schema: they were dropped, or have nulls."""

    @property
    def raw_columns(self) -> tuple[str, ...]:
        """Columns of :data:`keyshard.columns.record_batches.COLUMNS` that :meth:`decoded` needs."""
        names = [name for name in self._output.names if name in METADATA]
        if self.decodes or len(self._payload) or CORRUPT in self._output.names:
            names.append("value")
        if self.decodes:
            schemas = [schema for schema, _, _ in self._codecs.values()]
            # Messages of another version may have separate keys, even if the newest version has
            # not.
            pairs = any(schema.type == KEY_VALUE for schema in schemas)
            names += ["__topic", "__schemaVersion"]
            names += ["__messageId", "__partition"] if self._plan.mode == FAILFAST else []
            names += [KEY_BYTES] if pairs and not self._plan.connection.by_client else []
        return tuple(dict.fromkeys(names))

    def decoded(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Decode rows of :attr:`raw_columns` into the wanted columns.

        Raises:
            MalformedMessageError: A value cannot be decoded, in mode ``FAILFAST``.
            SchemaError: The version that a message was written with does not exist.
        """
        for batch in batches:
            found, reasons = self._decode(batch) if self.decodes else ({}, {})
            if reasons and self._plan.mode == FAILFAST:
                raise self._malformed(batch, *min(reasons.items()))
            arrays = [
                found[name] if name in found else self._own(name, batch, reasons)
                for name in self._output.names
            ]
            made = pa.RecordBatch.from_arrays(arrays, schema=self._output)
            self.malformed += len(reasons)
            if reasons and self._plan.mode == DROPMALFORMED:
                rest = [row for row in range(len(made)) if row not in reasons]
                made = made.take(pa.array(rest, pa.int32()))
            yield made

    def _own(self, name: str, batch: pa.RecordBatch, reasons: Mapping[int, str]) -> pa.Array:
        """Return a column that is not decoded."""
        if name != CORRUPT:
            return batch.column(name)
        values = batch.column("value")
        if not reasons:
            return pa.nulls(len(values), values.type)
        wrong = pa.array([row in reasons for row in range(len(values))])
        return compute.if_else(wrong, values, pa.scalar(None, values.type))

    def _decode(self, batch: pa.RecordBatch) -> tuple[dict[str, pa.Array], dict[int, str]]:
        """Return decoded columns by name, and for each malformed row the reason.

        Rows of one topic and version are decoded together.
        """
        groups = list(_groups(batch))
        if len(groups) == 1:
            ((topic, version, _),) = groups
            return self._decode_alike(batch, topic, version)
        parts: list[dict[str, pa.Array]] = []
        reasons: dict[int, str] = {}
        for topic, version, rows in groups:
            part, wrong = self._decode_alike(batch.take(rows), topic, version)
            parts.append(part)
            reasons |= {rows[row].as_py(): why for row, why in wrong.items()}
        if not parts:
            return {one.name: pa.nulls(0, one.type) for one in self._payload}, {}
        order = compute.sort_indices(pa.concat_arrays([rows for _, _, rows in groups]))
        return {
            name: pa.concat_arrays([part[name] for part in parts]).take(order) for name in parts[0]
        }, reasons

    def _decode_alike(
        self, batch: pa.RecordBatch, topic: str, version: int | None
    ) -> tuple[dict[str, pa.Array], dict[int, str]]:
        if not self._fits(topic):
            reasons = dict.fromkeys(range(len(batch)), self._unfit[topic])
            return {one.name: pa.nulls(len(batch), one.type) for one in self._payload}, reasons
        schema, codec, payload = self._codec(topic)
        if payload is None:
            return {one.name: batch.column("value") for one in self._payload}, {}
        writer = writer_of(self._plan, topic, schema, version)
        # A value of another schema type is malformed, wherever its keys are.
        if codec.kind != KEY_VALUE or not keys_apart(writer or schema):
            keys = pa.nulls(len(batch), pa.binary())
        elif KEY_BYTES in batch.schema.names:
            keys = batch.column(KEY_BYTES)
        else:
            raise SchemaError(
                f"The schema of {topic} stores keys separately, but the bytes of the keys were "
                "not read. pulsar-client does not provide them, and no topic had such a schema "
                "at the start.",
                f"Start again without transport='client'. In Python: {NAME_KEY_BYTES} Or set "
                "valueFormat=raw.",
                topic=topic,
            )
        in_parts = self._plan.mode == PERMISSIVE
        values, reasons = decode_rows(codec, batch.column("value"), keys, writer, in_parts=in_parts)
        return cast(values, payload), reasons

    def _fits(self, topic: str) -> bool:
        """Whether a topic has the wanted columns.

        A topic that was found later may not have them. Its rows may be in a planned batch, from
        which no option removes them.

        Raises:
            SchemaError: It does not, in mode ``FAILFAST``.
        """
        if topic in self._plan.schemas or topic in self._codecs:
            return True
        if topic in self._unfit:
            return False
        try:
            self._codec(topic)
        except SchemaError as exc:
            if self._plan.mode == FAILFAST:
                raise SchemaError(
                    f"A topic that was discovered later does not fit the query: {exc.problem}",
                    f"{exc.remedy} Or exclude the topic from the query. In a planned batch, "
                    f"mode={DROPMALFORMED} (malformed in Python) leaves its rows out, and "
                    f"mode={PERMISSIVE} puts their bytes into {CORRUPT}.",
                    topic=topic,
                ) from exc
            self._unfit[topic] = exc.message
            return False
        return True

    def _codec(self, topic: str) -> tuple[TopicSchema, Codec, pa.Schema | None]:
        """Return the schema, the codec and the columns of a topic."""
        found = self._codecs.get(topic)
        if found is None:
            schema = self._plan.schemas.get(scalable_topic_of(topic))
            if schema is None:  # a topic that was found later
                schema = schema_of(self._plan.connection, topic) or RAW
            codec = codec_of(schema, topic)
            payload = None if self._wants_bytes(schema, codec) else self._payload
            if self._needs_values and payload is not None and keys_apart(schema):
                _check_transport(self._plan.connection, topic)
            check(codec.type, codec.undescribed, payload or _NONE, topic)
            found = self._codecs[topic] = schema, codec, payload
        return found

    def _wants_bytes(self, schema: TopicSchema, codec: Codec) -> bool:
        """Whether ``value`` means the payload: the schema declares no such column of bytes."""
        if self._payload != _BYTES:
            return False
        return schema.type in WITHOUT_SCHEMA or columns_of(codec.type).get("value") != pa.binary()

    def _malformed(self, batch: pa.RecordBatch, row: int, why: str) -> MalformedMessageError:
        topic, message_id, partition = (
            batch.column(name)[row].as_py() for name in ("__topic", "__messageId", "__partition")
        )
        schema = self._codec(topic)[0]
        version = batch.column("__schemaVersion")[row].as_py()
        written = "" if version is None else f", written with version {version}"
        return MalformedMessageError(
            f"Message {message_id} of {topic}, partition {partition}, cannot be decoded by its "
            f"{schema.type} schema (version {schema.version}{written}): {why}.",
            f"Set mode={PERMISSIVE} (malformed in Python) to get its bytes in {CORRUPT}, "
            f"mode={DROPMALFORMED} to leave it out, or valueFormat=raw.",
            topic=topic,
            message_id=message_id,
        )


def _check_transport(connection: Connection, topic: str) -> None:
    if connection.by_client:
        raise SchemaError(
            f"The schema of {topic} stores keys separately, but pulsar-client cannot tell keys of "
            "bytes from keys of text.",
            "Set transport='wire', or valueFormat=raw to get the bytes.",
            topic=topic,
        )


def writer_of(
    plan: Decoding, topic: str, schema: TopicSchema, version: int | None
) -> TopicSchema | None:
    """Return the schema that messages of a version were written with.

    Args:
        plan: The plan of the query.
        topic: Full name.
        schema: The schema that values are decoded to.
        version: Version of the messages.

    Returns:
        ``None`` if ``schema`` can decode them alone.

    Raises:
        SchemaError: The version no longer exists.
    """
    if version is None or version == schema.version or schema.type in _SELF_DESCRIBING:
        return None
    key = (plan.name, topic, version)
    found = _other_versions.get(key)
    if found is None:
        found = schema_of(plan.connection, topic, version)
        if found is None and schema.type in _BY_NUMBER:
            found = schema
        if found is None:
            raise SchemaError(
                f"Version {version} of the schema of {topic} no longer exists, but messages were "
                "written with it.",
                "Register it again, or set valueFormat=raw to get the bytes.",
                topic=topic,
            )
        _other_versions[key] = found
        keep_newest(_other_versions, VERSIONS_MAX)
    return found


def keep_newest(entries: dict[Any, Any], most: int) -> None:
    """Remove the older half of a cache that has more than ``most`` entries; from any thread."""
    if len(entries) > most:
        for old in list(entries)[: len(entries) // 2]:
            entries.pop(old, None)


_BYTES = pa.schema([pa.field("value", pa.binary())])
_NONE = pa.schema([])
_SELF_DESCRIBING = ("JSON", *WITHOUT_SCHEMA)
"""Types whose values can be decoded without the writer's version. For all others, a version may
have another type, if the broker accepts any schema, and its values may look valid."""
_BY_NUMBER = ("PROTOBUF_NATIVE", "PROTOBUF")
"""Types whose fields are known by number, so that a version may be missing."""


def _groups(batch: pa.RecordBatch) -> Iterator[tuple[str, int | None, pa.Array]]:
    """Return each topic and version, and its rows."""
    topics = batch.column("__topic").dictionary_encode()
    versions = batch.column("__schemaVersion").dictionary_encode("encode")
    width = len(versions.dictionary)
    codes = compute.add(compute.multiply(topics.indices, width), versions.indices)
    for code in compute.unique(codes):
        rows = compute.indices_nonzero(compute.equal(codes, code))
        topic, version = divmod(code.as_py(), width)
        yield topics.dictionary[topic].as_py(), versions.dictionary[version].as_py(), rows
