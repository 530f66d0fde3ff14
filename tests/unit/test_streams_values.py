"""Published and expected values of ``tests.streams``, by the decoders of its queries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from keyshard.columns.codec import decode_rows
from keyshard.columns.codecs import codec_of
from keyshard.core.topic_schema import TopicSchema
from tests.streams.values import (
    AVRO,
    BAD,
    JSON,
    KINDS,
    NONE,
    PROTOBUF,
    RECORDS,
    Sent,
    encoded,
    malformed,
    schema_of,
    wrong,
)

SENT = Sent(
    5, "t", 0, 1, "k", None, AVRO, 0, tombstone=False, corrupt=False, payload=None, confirmed=True
)


def decoded(sent: Sent, reader: int) -> tuple[dict[str, Any], str]:
    schemas = {}
    for version in {reader, sent.version}:
        output = schema_of(sent.kind, version)
        assert output is not None
        definition = output.definition.encode()
        schemas[version] = TopicSchema(output.type, definition, version, output.properties or {})
    codec = codec_of(schemas[reader], "t")
    key = sent.key.encode() if isinstance(sent.key, str) else sent.key
    values, keys = pa.array([sent.payload], pa.binary()), pa.array([key], pa.binary())
    found, reasons = decode_rows(codec, values, keys, schemas[sent.version])
    (row,) = found.to_pylist()
    return row if isinstance(row, dict) else {"value": row}, reasons.get(0, "")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != NONE])
def test_a_right_row_passes_and_a_wrong_one_fails(kind: str) -> None:
    versions = (0, 1) if kind in RECORDS else (0,)
    for written in versions:
        for reader in versions:
            sent = replace(SENT, kind=kind, version=written)
            sent = replace(sent, payload=encoded(kind, written, 5, sent.name, "k"))
            row, reason = decoded(sent, reader)
            assert not reason
            assert not wrong(sent, row, "FAILFAST")
            assert wrong(replace(sent, number=6), row, "FAILFAST")
            assert wrong(replace(sent, corrupt=True), row, "FAILFAST")
    for number in (5, 6):
        _, reason = decoded(replace(SENT, kind=kind, payload=malformed(kind, number)), 0)
        assert reason


@pytest.mark.parametrize("kind", [AVRO, JSON])
def test_values_are_malformed_if_writer_and_reader_schemas_are_incompatible(kind: str) -> None:
    for written, reader in ((BAD, 0), (0, BAD)):
        payload = encoded(kind, written, 5, "né5", "k")
        assert decoded(replace(SENT, kind=kind, version=written, payload=payload), reader)[1]
    assert schema_of(PROTOBUF, 0) != schema_of(PROTOBUF, 1)
