"""Unexpected values: each is refused by one sentence that names the option, or works."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from keyshard import HandlerConfig, KeyShardSource
from keyshard.broker.admin.rest import PulsarAdmin
from keyshard.config.connection import Connection
from keyshard.config.source import SourceConfig
from keyshard.coordinator.batch_reading import BatchTicket
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.errors import CheckpointError, ConfigError, KeyShardError, NotRunningError
from keyshard.handlers.checkpoint_store import CheckpointStore
from keyshard.redaction import redacted, shown
from spark_adapter.option_parsing import parse_options
from spark_adapter.options import OPTIONS

SECRET = "pa55word"


class Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    def __hash__(self) -> int:
        raise RuntimeError("no hash")


VALUES: list[Any] = [
    True, -1, 10**40, -0.5, math.nan, math.inf, b"x", "\ud800", "", "a\0b", [None], {"a": 1}, (1,),
    object(), Hostile(), Hostile, 1j,
]  # fmt: skip
NOT_NONE = {
    "batch_tasks",
    "connection",
    "batch_rows_max",
    "batch_bytes_max",
    "batch_rows_min",
    "metrics_port",
    "admin_url",
    "subscription",
    "topics_pattern",
    "name",
    "ui_port",
    "ui_token",
}


@pytest.mark.parametrize("name", [field.name for field in fields(SourceConfig)])
def test_a_source_refuses_unexpected_values_in_one_sentence(name: str) -> None:
    for value in [*VALUES, *([] if name in NOT_NONE else [None])]:
        given = {"topics": "t", "subscription": "s"} | {name: value}
        if name == "topics_pattern":
            del given["topics"]
        if name in ("fail_on_data_loss", "telemetry") and value is True:
            continue
        with pytest.raises(ConfigError) as caught:
            SourceConfig(**given)
        assert_sentence(caught.value, name)


@pytest.mark.parametrize("name", [field.name for field in fields(HandlerConfig)])
def test_a_run_refuses_unexpected_values_in_one_sentence(name: str) -> None:
    optional = {
        "workers", "dead_letter_topic", "checkpoint", "metrics_port", "ui_port", "ui_token",
        "rate_limit", "rate_burst",
    }  # fmt: skip
    for value in [*VALUES, *([] if name in optional else [None])]:
        if name == "telemetry" and value is True:
            continue
        with pytest.raises(ConfigError) as caught:
            HandlerConfig(**{name: value})
        assert_sentence(caught.value, name)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_spark_takes_unexpected_values_or_refuses_them_in_one_line(option: Any) -> None:
    for text in ["", "\ud800", "9" * 5_000, "nan", "-1", "1e400", "\0"]:
        base = {"topic": "t", "subscription": "s"}
        given = {key: one for key, one in base.items() if key != option.name} | {option.name: text}
        if option.name in ("topics", "topicsPattern"):
            given.pop("topic", None)
        output = refusal(partial(parse_options, given))
        assert "\n" not in output
        assert len(output) < 500 or output.startswith("KeyShardSource(")


def test_calls_of_a_source_refuse_unexpected_values() -> None:
    source = KeyShardSource("t")
    for value in ("8", True, 0, -1, 65_537, 1.5, math.nan, b"8"):
        with pytest.raises(ConfigError, match="ranges is"):
            source.rescale(value)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="balance is 1"):
        source.rescale(balance=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Nothing selects dead letters"):
        source.unpark(None)  # type: ignore[arg-type]
    for rows in (None, 0, "5", math.nan):
        with pytest.raises(ConfigError, match="max_rows is"):
            source.batches(max_rows=rows)  # type: ignore[arg-type]
    for wait_s in (None, -1, "5", math.nan, math.inf):
        with pytest.raises(ConfigError, match="max_wait_s is"):
            source.batches(max_wait_s=wait_s)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="observers is 5"):
        source.run(print, observers=5)  # type: ignore[arg-type]
    for call in (partial(source.run, print), source.messages):
        with pytest.raises(ConfigError, match="objects with the methods started"):
            call(observers=[print])  # type: ignore[list-item]
    with pytest.raises(NotRunningError):
        source.rescale(8)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "9" * 5_000, "", "NaN", "\0"])
def test_text_that_is_no_checkpoint_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError):
        Checkpoint.from_json(text)


@pytest.mark.parametrize("value", [b"{}", 5, Path("x"), Hostile()])
def test_a_checkpoint_is_a_text(value: Any) -> None:
    with pytest.raises(
        CheckpointError, match=r"The checkpoint is .*.\nRemedy: Use the stored text"
    ):
        KeyShardSource("t", subscription="keyshard", service_url="memory://no-text").open(value)


def test_a_checkpoint_may_be_a_path(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "orders.json")
    store.save(Checkpoint("c", "s", 3))
    assert store.load() == Checkpoint("c", "s", 3)
    assert HandlerConfig(checkpoint=tmp_path / "x").checkpoint == str(tmp_path / "x")


@pytest.mark.parametrize(
    "url",
    [
        f"http://ann:{SECRET}@host:8080/",
        f"pulsar://ann:{SECRET}@a:6650,b:6650",
        f"s3://key:{SECRET}@bucket/x?token={SECRET}&a=b",
        f"simplecache::http://h/x?sig={SECRET}",
        f"https://h/?AWS_secret_access_key={SECRET}",
        f"http://ann:{SECRET}/with slash@host",
    ],
)
def test_no_secret_of_a_url_is_shown(url: str) -> None:
    assert SECRET not in shown(url)
    if " " not in url:
        assert SECRET not in redacted(f"Could not reach {url}: because.")
        assert SECRET not in str(KeyShardError(f"At {url}!", url=url).facts)
        assert SECRET not in str(KeyShardError(f"At {url}!"))
    for name in ("service_url", "admin_url", "topics", "subscription"):
        given: dict[str, Any] = {"topics": "t"} | {name: url}
        assert SECRET not in refusal(partial(KeyShardSource, **given))
    assert SECRET not in repr(HandlerConfig(checkpoint=url))
    assert SECRET not in refusal(lambda: CheckpointStore(url))


def test_no_secret_of_the_admin_url_is_shown_without_an_answer() -> None:
    admin = PulsarAdmin(Connection(admin_url=f"http://ann:{SECRET}@127.0.0.1:1"))
    error: BaseException | None
    with pytest.raises(KeyShardError) as caught:
        admin.cluster()
    error = caught.value
    while error is not None:
        assert SECRET not in repr(error) + str(error)
        error = error.__cause__ or error.__context__


def test_the_token_of_a_ticket_is_not_shown() -> None:
    assert SECRET not in repr(BatchTicket("grpc://h:1", SECRET, "b", 0, ("value",)))


def refusal(call: Callable[[], object]) -> str:
    """The error of a call, or the repr of its result."""
    try:
        return repr(call())
    except KeyShardError as error:
        return f"{error.summary} {error.__cause__!r}"


def assert_sentence(error: ConfigError, name: str) -> None:
    text = error.message
    assert "\n" not in text
    assert len(text) < 400
    assert text.endswith(".")
    assert re.search(rf"\b{name}\b|topic|null|No ", text), text
