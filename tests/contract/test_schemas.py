"""Contract: the schema of a topic, and the schema version of messages."""

from __future__ import annotations

import json

import pytest

from tests.contract.contract_harness import Harness

FIRST = {"type": "record", "name": "R", "fields": [{"name": "a", "type": "int"}]}
SECOND = {
    "type": "record",
    "name": "R",
    "fields": [*FIRST["fields"], {"name": "b", "type": ["null", "string"], "default": None}],
}


@pytest.mark.parametrize("partitions", [0, 2])
def test_each_version_of_a_schema_is_reported_and_the_newest_where_none_is_named(
    harness: Harness, partitions: int
) -> None:
    topic = harness.create_topic(partitions)
    assert harness.schema(topic) is None
    assert harness.schema(topic, 0) is None
    for schema in FIRST, SECOND:
        harness.add_schema(topic, "AVRO", json.dumps(schema), {"owner": "shop"})
    for version, schema in [(0, FIRST), (1, SECOND), (None, SECOND)]:
        found = harness.schema(topic, version)
        assert found is not None
        assert (found.type, found.version) == ("AVRO", 1 if version is None else version)
        assert json.loads(found.definition) == schema
        assert found.properties["owner"] == "shop"
        if partitions:
            assert harness.schema(f"{topic}-partition-1", version) == found
    assert harness.schema(topic, 7) is None


@pytest.mark.parametrize("kind", ["STRING", "INT64", "BOOLEAN", "LOCAL_DATE_TIME"])
def test_a_primitive_is_identified_by_its_name(harness: Harness, kind: str) -> None:
    topic = harness.create_topic()
    harness.add_schema(topic, kind)
    found = harness.schema(topic)
    assert found is not None
    assert (found.type, found.definition, found.version) == (kind, b"", 0)


def test_a_topic_that_does_not_exist_has_no_schema(harness: Harness) -> None:
    assert harness.schema(f"{harness.create_topic()}-no") is None
