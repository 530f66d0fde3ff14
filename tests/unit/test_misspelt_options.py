"""A misspelt name of an option is answered with the nearest one; editors still see all of them."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import typing
from collections.abc import Callable
from typing import Any

import pytest

import ray_adapter
from keyshard import Connection, HandlerConfig, KeyShardSink, KeyShardSource
from keyshard.config.handlers import HandlerOptions
from keyshard.core.option_checks import did_you_mean
from keyshard.errors import ConfigError
from ray_adapter.options import JobOptions

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")

SOURCE = KeyShardSource("t", subscription="s", service_url="memory://nowhere")
CALLS: list[tuple[Callable[..., Any], str, str]] = [
    (lambda **given: KeyShardSource("t", **given), "paralellism", "parallelism"),
    (lambda **given: KeyShardSource("t", **given), "subscribtion", "subscription"),
    (lambda **given: dataclasses.replace(SOURCE, **given), "on_corupt", "on_corrupt"),
    (Connection, "service_ulr", "service_url"),
    (HandlerConfig, "on_faliure", "on_failure"),
    (lambda **given: KeyShardSink("t", **given), "sinkid", "sink_id"),
    (lambda **given: SOURCE.run(print, **given), "lane", "lanes"),
    (SOURCE.batches, "max_row", "max_rows"),
    (lambda **given: ray_adapter.run(SOURCE, print, **given), "paralelism", "parallelism"),
]


@pytest.mark.parametrize(("call", "wrong", "meant"), CALLS)
def test_the_nearest_option_is_named(call: Callable[..., Any], wrong: str, meant: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"has no option {wrong!r}\.\nRemedy: Did you mean {meant!r}\?"
    ):
        call(**{wrong: 2})


def test_the_error_names_the_class_that_the_program_calls() -> None:
    with pytest.raises(ConfigError, match=r"KeyShardSink has no option 'zzz'"):
        KeyShardSink("t", zzz=1)  # type: ignore[call-arg]


def test_a_name_that_is_near_to_none_is_answered_with_all() -> None:
    with pytest.raises(
        ConfigError, match=r"has no option 'zzz'\.\nRemedy: The options are: .*lanes, metrics_host"
    ):
        SOURCE.run(print, zzz=1)  # type: ignore[call-arg]


def test_the_case_of_a_name_hides_nothing() -> None:
    assert did_you_mean("SERVICEURL", ["service.url", "x"]) == "Did you mean 'service.url'?"
    assert did_you_mean("path", ["service.url"]) == ""
    assert did_you_mean("path", [], "There are none.") == "There are none."


def test_signatures_stay_visible() -> None:
    for call, name, kind in (
        (KeyShardSource, "parallelism", int),
        (Connection, "service_url", str),
        (HandlerConfig, "lanes", int),
        (KeyShardSource.batches, "max_rows", int),
        (ray_adapter.run, "start_timeout_s", float),
    ):
        parameters = inspect.signature(call).parameters
        assert parameters[name].annotation in (kind, kind.__name__)
        assert not any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    assert pickle.loads(pickle.dumps(SOURCE)) == SOURCE


@pytest.mark.parametrize(
    ("config", "given"),
    [(HandlerConfig, {}), (KeyShardSource, {"topics": "t"}), (JobOptions, {"parallelism": 1})],
)
def test_the_words_of_a_choice_are_in_its_type(config: Any, given: dict[str, Any]) -> None:
    """Type checkers find the same errors as the run time."""
    found = 0
    for name, hint in typing.get_type_hints(config).items():
        if typing.get_origin(hint) is not typing.Literal:
            continue
        found += 1
        words = typing.get_args(hint)
        for word in words:
            config(**given, **{name: word})
        with pytest.raises(ConfigError) as caught:
            config(**given, **{name: f"{words[0]}x"})
        assert all(repr(word) in str(caught.value) for word in words)
    assert found
    assert typing.get_type_hints(HandlerConfig) == typing.get_type_hints(HandlerOptions)
