"""Bounds of a read as users write them."""

from __future__ import annotations

import re
import sys
from datetime import datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from keyshard.core.message import MessageId
from keyshard.core.position.read_bounds import (
    Edge,
    bound_text,
    check_order,
    parse_bound,
    parse_bounds,
)
from keyshard.errors import ConfigError
from tests.helpers import P0, P1

NOV_21 = 1_795_219_200_000
"""Midnight of 21 November 2026 in UTC."""
ZONE = timezone(timedelta(hours=1))


@pytest.mark.parametrize(
    ("given", "bound"),
    [
        ("earliest", Edge.EARLIEST),
        (" Earliest", Edge.EARLIEST),
        (" latest ", Edge.LATEST),
        ("3:5", MessageId(3, 5, 0)),
        ("3:5:7", MessageId(3, 5, 7)),
        (MessageId(3, 5, 7), MessageId(3, 5, 7)),
        (0, 0),
        (NOV_21, NOV_21),
        ("2026-11-21", NOV_21),
        ("2026-11-21T00:00", NOV_21),
        ("2026-11-21 00:00:00Z", NOV_21),
        ("2026-11-21T00:00:00.000z", NOV_21),
        ("2026-11-21T01:00:00+01:00", NOV_21),
        ("2026-11-21T01:00+0100", NOV_21),
        ("2026-11-20T19:00:00.5-05:00", NOV_21 + 500),
        ("2026-11-21T00:00:00.123456789Z", NOV_21 + 124),
        (datetime(2026, 11, 21), NOV_21),  # noqa: DTZ001 - a time without a zone is the case
        (datetime(2026, 11, 21, 1, tzinfo=ZONE), NOV_21),
        (datetime(2026, 11, 21, microsecond=1, tzinfo=timezone.utc), NOV_21 + 1),
        (datetime(1969, 7, 20, tzinfo=timezone.utc), 0),
        (datetime.max, 253_402_300_799_999),  # noqa: DTZ901 - so is this
        (datetime.min, 0),  # noqa: DTZ901 - so is this
    ],
)
def test_a_bound_is_an_edge_a_position_or_a_time(given: Any, bound: object) -> None:
    parsed = parse_bound("start", given)
    assert parsed == bound
    assert type(parsed) is type(bound)


def test_the_hour_that_comes_twice_has_two_times() -> None:
    zone = ZoneInfo("Europe/Berlin")
    first = datetime(2026, 10, 25, 2, 30, tzinfo=zone, fold=0)
    second = datetime(2026, 10, 25, 2, 30, tzinfo=zone, fold=1)
    times = [parse_bound("start", one) for one in (first, second)]
    assert times == [parse_bound("start", f"2026-10-25T0{hour}:30Z") for hour in (0, 1)]


def test_a_day_of_a_change_of_clocks_has_25_hours() -> None:
    zone = ZoneInfo("Europe/Berlin")
    start = parse_bound("start", datetime(2026, 10, 25, tzinfo=zone))
    end = parse_bound("end", datetime(2026, 10, 26, tzinfo=zone))
    assert isinstance(start, int)
    assert end == start + 25 * 3_600_000


@pytest.mark.parametrize(
    "given",
    [
        None, True, 1.5, b"3:5", "", "3", "3:", ":5", "-3:5", "3:-1", "3:5:-1", "3:5:6:7",
        "\u0663:\u0665",
        "yesterday", "early", "20261121", "1795219200000", "2026-13-01", "2026-02-30",
        "2026-11-21T25:00", "2026-11-21T10", "2026-11-21T10:00.5", "2026-11-21T00:00+25:00",
        "2026-11-21T00:00 Europe/Berlin", "2026-W47-6", "3:" + "9" * 30, f"3:{2**63}",
        f"{2**63}:0", "x" * 10_000, "\ud800",
        -1, 10**30, 253_402_300_800_000, sys.maxsize, [], object(), timedelta(1),
        datetime(2026, 1, 1).date(), {"nested": "3:5"},  # noqa: DTZ001
    ],
)  # fmt: skip
def test_an_invalid_bound_is_reported_in_a_sentence(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"(?s)^.{10,800}$") as raised:
        parse_bound("start", given)
    assert "start is " in str(raised.value)


@pytest.mark.parametrize("seconds", [1, 1_795_219_200, 10**11 - 1])
def test_seconds_are_not_taken_for_milliseconds(seconds: int) -> None:
    with pytest.raises(ConfigError, match=re.escape("multiply it by 1000")):
        parse_bound("end", seconds)


def test_each_topic_partition_may_have_its_own_bound() -> None:
    named = {P0.name: "3:5", P1: "latest"}
    assert parse_bounds("start", named, [P0, P1]) == {P0: MessageId(3, 5, 0), P1: Edge.LATEST}
    assert parse_bounds("start", "3:5", [P0]) == {P0: MessageId(3, 5, 0)}
    assert parse_bounds("start", {"t-partition-0": 0}, [P0]) == {P0: 0}
    assert parse_bounds("end", "latest", []) == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("3:5", "2 topic partitions are read"),
        ({P0.name: "3:5"}, f"has no position for {P1}"),
        ({P0.name: "3:5", P1.name: "3:5", "other": "1:1"}, "names persistent://public/default/oth"),
        ({"a b": "3:5"}, "has the key 'a b'"),
        ({5: "3:5"}, "has the key 5"),
        ({"non-persistent://a/b/c": "1:1"}, "has the key"),
        ({P0.name: "x", P1.name: "3:5"}, f"start of {P0} is 'x'"),
        ({}, "has no position for"),
    ],
)
def test_a_bound_that_fits_no_partition_is_reported(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_bounds("start", given, [P0, P1])


@pytest.mark.parametrize(
    ("start", "end", "ordered"),
    [
        (5, 5, True),
        (6, 5, False),
        (MessageId(3, 5, 0), MessageId(3, 5, 0), True),
        (MessageId(3, 5, 1), MessageId(3, 5, 0), False),
        (Edge.LATEST, Edge.EARLIEST, False),
        (Edge.LATEST, Edge.LATEST, True),
        (Edge.EARLIEST, Edge.EARLIEST, True),
        (MessageId(3, 5, 0), 5, True),
    ],
)
def test_a_start_after_its_end_is_reported(start: Any, end: Any, ordered: bool) -> None:
    if ordered:
        check_order({P0: start}, {P0: end})
        return
    with pytest.raises(ConfigError, match=f"start of {P0} is .* after its end"):
        check_order({P0: start}, {P0: end})


def test_distant_times_are_shown() -> None:
    times = [parse_bound("start", one) for one in (datetime.max, "2026-11-21")]  # noqa: DTZ901
    with pytest.raises(ConfigError, match="is 9999-12-31T23:59:59"):
        check_order({P0: times[0]}, {P0: times[1]})


def test_times_are_shown_as_people_read_them() -> None:
    assert bound_text(NOV_21) == "2026-11-21T00:00:00+00:00"
    assert bound_text(Edge.LATEST) == "latest"
    assert bound_text(MessageId(1, 2, 3)) == "1:2:3"
