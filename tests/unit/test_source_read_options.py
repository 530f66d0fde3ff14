"""``source.read`` refuses wrong arguments before it asks a broker for anything."""

from __future__ import annotations

from typing import Any

import pytest

from keyshard import KeyShardSource, SourceRead
from keyshard.core.position.entry import TopicPartition
from keyshard.core.position.split import Split
from keyshard.errors import ConfigError

NOWHERE = KeyShardSource(
    "orders", service_url="pulsar://127.0.0.1:1", admin_url="http://127.0.0.1:1"
)
HALF = "\ud800"
"""Half a surrogate pair, which no text of Pulsar has."""


NO_BOUNDS: list[Any] = ["x", None, True, 1.5, ""]
NO_COLUMNS: list[Any] = ["value", 5, [], ["v"], [[]]]
WRONG: dict[str, list[tuple[Any, str]]] = {
    "start": [
        *((one, "(?s)start is .*Remedy: Write 'earliest'") for one in NO_BOUNDS),
        (1_700_000_000, "If it is in seconds, multiply it by 1000"),
    ],
    "end": [("1:2:3:4", "(?s)end is '1:2:3:4'.*Remedy: Write 'earliest'")],
    "keys": [(one, "a list of keys") for one in ("k1", 5, ["k1", 5], [b"k1"], [HALF], [])],
    "columns": [
        *((one, "Name some of value, __key") for one in NO_COLUMNS),
        (["value", "value"], "has a column twice"),
        (["__range"], "Column __range does not exist"),
    ],
    "disorder_max_s": [(one, "number of seconds") for one in (-1, "1", float("nan"), 10**12)],
    "segments": [(one, r"Give Segments\('auto'\) or None") for one in ("auto", True, 1)],
    "bytes_in_flight_max": [
        (one, "an integer from 1048576 to") for one in (0, 2**20 - 1, 1e7, "32m")
    ],
    "ledger_index": [(one, "path or an fsspec URL") for one in (5, "", HALF, b"/index")],
}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [(name, value, said) for name, found in WRONG.items() for value, said in found],
)
def test_a_wrong_argument_is_named_at_once(name: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        NOWHERE.read(**{name: value})


@pytest.mark.parametrize(
    ("given", "meant"),
    [("strat", "start"), ("colums", "columns"), ("segment", "segments"), ("startingTime", "")],
)
def test_a_misspelt_argument_is_refused(given: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"read\(\) has no option '{given}'") as caught:
        NOWHERE.read(**{given: "earliest"})  # type: ignore[arg-type]
    assert f"Did you mean {meant!r}?" in str(caught.value) or not meant


@pytest.mark.parametrize("parts", [0, -1, True, 1.5, "3", None, 10**9])
def test_the_number_of_parts_is_checked(parts: Any) -> None:
    read = SourceRead(NOWHERE.how_to_connect(), [Split(TopicPartition("t", -1), ())], ["value"])
    with pytest.raises(ConfigError, match=r"^.KEYSHARD_BAD_OPTION. parts is .* from 1 to"):
        read.split(parts)
