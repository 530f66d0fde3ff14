"""``ray_adapter.read`` refuses wrong options before it asks a broker or Ray for anything."""

from __future__ import annotations

from typing import Any

import pytest

import ray_adapter
from keyshard import KeyShardSink, KeyShardSource
from keyshard.errors import ConfigError
from ray_adapter.datasink import KeyShardDatasink

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")

NOWHERE = KeyShardSource(
    "orders", service_url="pulsar://127.0.0.1:1", admin_url="http://127.0.0.1:1"
)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("strat", "start"),
        ("ends", "end"),
        ("column", "columns"),
        ("disorder_max", "disorder_max_s"),
        ("override_num_block", "override_num_blocks"),
        ("begin", ""),
        ("read_args", ""),
        ("datasource", ""),
        ("options", ""),
        ("\ud800" * 1_000, ""),
    ],
)
def test_an_unknown_option_is_refused(given: str, meant: str) -> None:
    """Ray dropped a misspelt bound, so the whole topic was read."""
    with pytest.raises(ConfigError, match="has no option") as caught:
        ray_adapter.read(NOWHERE, **{given: "2026-11-20T00:00+01:00"})  # type: ignore[arg-type]
    assert "own options are start, end, keys, columns" in str(caught.value)
    if meant:
        assert f"Did you mean {meant!r}?" in str(caught.value)


@pytest.mark.parametrize("name", ["override_num_blocks", "concurrency", "parallelism"])
@pytest.mark.parametrize("value", [0, -2, True, 1.5, "3", 10**9, [], float("nan")])
def test_a_number_of_blocks_or_tasks_is_checked(name: str, value: Any) -> None:
    """``override_num_blocks=0`` was an IndexError inside the plan of the read."""
    with pytest.raises(ConfigError, match=f"^.KEYSHARD_BAD_OPTION. {name} is .* from 1 to"):
        ray_adapter.read(NOWHERE, **{name: value})


def test_the_tasks_of_a_write_share_no_port_for_metrics() -> None:
    sink = KeyShardSink("t", metrics_port=9465)
    assert KeyShardDatasink(sink)._sink.metrics_port is None


@pytest.mark.parametrize("keys", ["k1", 5, ["k1", 5], [b"k1"], ["\ud800"], []])
def test_keys_are_a_list_of_texts(keys: Any) -> None:
    with pytest.raises(ConfigError, match="Write a list of keys"):
        ray_adapter.read(NOWHERE, keys=keys)
