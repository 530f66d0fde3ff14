"""An error of keyshard in Spark: ten lines, of which the last are its own."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StringType, StructField, StructType

from keyshard.errors import (
    BrokerUnavailableError,
    ConfigError,
    KeyShardError,
    ReplayTimeoutError,
)
from spark_adapter.data_source import KeyShardDataSource
from spark_adapter.error_text import as_spark_error, concise_errors
from spark_adapter.pulsar.source import PulsarDataSource
from tests.support.error_text import has_error_form

LINES_MAX = 8
"""Spark adds two of its own, and leaves its frames out."""
COLUMNS = StructType([StructField("__key", StringType())])
CALLS: list[Callable[[DataSource], Any]] = [
    lambda source: source.schema(),
    lambda source: source.reader(COLUMNS),
    lambda source: source.streamReader(COLUMNS),
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", [KeyShardDataSource, PulsarDataSource])
@pytest.mark.parametrize(
    "options",
    [
        {"topik": "orders"}, {"topic": "orders", "windowMaxRows": "0", "subscription": "s"},
        {"topic": "orders", "pulsar.client.numIoThreads": "x", "pulsar.reader.x": "y"},
    ],
)  # fmt: skip
def test_a_wrong_option_is_reported_in_few_lines(
    call: Callable[[DataSource], Any], kind: type[DataSource], options: dict[str, str]
) -> None:
    """They were 14 to 16 lines, most of them frames of the parser of options."""
    with pytest.raises(ConfigError) as caught:
        call(kind(options))
    lines = shown_by_spark(caught.value)
    assert len(lines) <= LINES_MAX, "\n".join(lines)
    assert has_error_form("\n".join(lines[-3:])), lines


@pytest.mark.parametrize("kind", [KeyShardDataSource, PulsarDataSource])
def test_an_error_of_the_schemas_names_the_source(
    kind: type[DataSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue: with format("pulsar"), the error of load() named no topic."""

    def unavailable(_: object) -> None:
        raise BrokerUnavailableError("The broker does not answer.")

    monkeypatch.setattr("spark_adapter.query_columns.plan_of", unavailable)
    with pytest.raises(BrokerUnavailableError) as caught:
        kind({"topic": "orders"}).schema()
    assert caught.value.place == "source of persistent://public/default/orders"


def shown_by_spark(error: KeyShardError) -> list[str]:
    """Return its lines without the frames of this file."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    text = traceback.format_exception(type(error), error, frames)
    return "".join(text).strip().splitlines()


def test_causes_and_inner_frames_are_left_out_and_other_errors_are_not() -> None:
    def fails(depth: int, error: Exception) -> None:
        if depth:
            fails(depth - 1, error)
        raise error from OSError("refused")

    def output(by: Any, error: Exception) -> str:
        with pytest.raises(type(error)) as caught, by:
            fails(20, error)
        return "".join(traceback.format_exception(caught.value))

    unavailable = BrokerUnavailableError("admin_url does not answer", topic="t")
    assert "refused" not in output(concise_errors(), unavailable)
    assert "admin_url does not" in output(concise_errors(), unavailable)
    assert "admin.url does not" in output(as_spark_error(), unavailable)
    assert "fails" not in output(as_spark_error(), unavailable)
    assert output(as_spark_error(), ValueError("x")).count("fails(depth - 1") > 1


def test_the_remedy_for_a_slow_replay_names_an_option_of_spark() -> None:
    """There was none, so a query whose replay took too long could not be started again."""
    with pytest.raises(ReplayTimeoutError, match="raise replayTimeoutMillis"), as_spark_error():
        raise ReplayTimeoutError("Too long.", "Check the broker, or raise replay_timeout_ms.")
