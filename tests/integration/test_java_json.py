"""Pulsar's Java client writes and reads what the unit tests of its JSON say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import java_forms
from tests.support.java_values import load, write

pytestmark = pytest.mark.broker

READ_OTHERWISE = {"java.time.Duration", "java.util.BitSet"}
"""Jackson reads another value than it wrote: of a negative duration, and of a set of bits."""


def test_the_kept_values_are_those_of_the_java_client(tmp_path: Path) -> None:
    written = write(tmp_path)
    assert {
        java: (json.dumps(json.loads(schema)), value)
        for java, (schema, value, _) in written.items()
    } == load()
    again = {java for java, (_, value, second) in written.items() if value != second}
    assert again == READ_OTHERWISE


def test_the_kept_answers_to_other_forms_are_those_of_the_java_client(tmp_path: Path) -> None:
    assert java_forms.ask(tmp_path) == java_forms.load()
