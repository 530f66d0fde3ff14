"""``keyshard status``, ``explain``, ``rescale`` and ``plan``."""

from __future__ import annotations

import json
import os
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from keyshard.cli.output import duration
from keyshard.control import ControlServer
from keyshard.core.lanes.lane_status import LatencyHistogram
from keyshard.core.recent_history import History
from keyshard.core.rescale_history import Rescale, RescaleEnd
from keyshard.core.ring.key_slot import key_slot
from keyshard.errors import ConfigError
from tests.helpers import present
from tests.support.command_line import run
from tests.support.control_folder import own_control_folder
from tests.support.statuses import lag, partition_status, range_status, status

watching = import_module("keyshard.cli.status")


@pytest.fixture(autouse=True)
def folder() -> Iterator[None]:
    with own_control_folder():
        yield


class Asked:
    """A source with answers of the test; it records the requests."""

    def __init__(self, told: Mapping[str, Any], subscription: str = "s") -> None:
        self.told = told
        self.requests: list[Mapping[str, Any]] = []
        names = ("status", "explain", "rescale")
        self.server = ControlServer(
            subscription, "pulsar://a", "t", dict.fromkeys(names, self.answer)
        )

    def answer(self, request: Mapping[str, Any]) -> Any:
        self.requests.append(request)
        return self.told

    def __enter__(self) -> Asked:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.close()


def test_stacks_are_limited_and_a_missing_one_has_its_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    running = {
        "key": "k" * 100, "range": 0, "topic": "t", "partition": 0, "messageId": "1:2:0",
        "attempts": 2, "state": "running", "runningSeconds": 34.2, "retryInSeconds": None,
        "error": "",
    }  # fmt: skip
    runs = [running, running | {"messageId": "1:3:0"}, running, running | {"state": "retrying"}]

    def stack(request: Mapping[str, Any]) -> Any:
        if request["id"] == "1:3:0":
            raise ConfigError("No handler runs message 1:3:0 now.")
        return {"key": "k", "runningSeconds": 34.3, "stack": ['File "a.py"', "  wait(\x1b)"]}

    server = ControlServer(
        "s", "pulsar://a", "t", {"runs": lambda _: {"runs": runs}, "stack": stack}
    )
    try:
        out = run(capsys, "stacks", "--limit", "2")[1].splitlines()
        told = json.loads(run(capsys, "stacks", "--limit", "2", "--json")[1])
    finally:
        server.close()
    key = "'" + "k" * 59 + "..."
    assert out == [
        f"key {key}, message 1:2:0 of t, partition 0, attempt 3, for 34 s:",
        '  File "a.py"',
        "    wait(?)",
        f"key {key}, message 1:3:0 of t, partition 0, attempt 3, for 34 s:",
        "  (No handler runs message 1:3:0 now.)",
        "1 more of 's' run; --limit shows more.",
    ]
    assert told["running"] == 3
    assert [one["problem"] for one in told["stacks"]] == [
        None, "No handler runs message 1:3:0 now.",
    ]  # fmt: skip


BUSY = status(
    ranges=[
        range_status(
            0,
            hashRanges=["0-32767"],
            state="stalled",
            waiting=1_234,
            inFlight=1,
            oldestUnacknowledgedMillis=12_300,
            blockedBy={
                "key": "order-[17]", "messageId": "5:6:0", "attempts": 2,
                "reason": "the handler has not returned for 9.0 s",
            },
            stalled={
                "forSeconds": 9.0, "kind": "handler",
                "reason": "the handler has not returned for 9.0 s: key",
            },
        ),
        range_status(1, hashRanges=["32768-65535"], state="running"),
    ],
    partitions=[
        partition_status(0, backlog=77, ackGaps=3, ackGapsMax=10_000, replay=4, replayMax=4_000),
        partition_status(1, covered=False, gaps=["0-32767"]),
    ],
    parkedKeys=8,
    parked=[{"key": "bad", "deadLetters": 2}],
)  # fmt: skip


def test_status_shows_ranges_partitions_and_parked_keys(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Asked(BUSY):
        code, out, _ = run(capsys, "status", "s")
    assert code == 0
    for text in (
        "'s' on persistent://public/default/t at pulsar://127.0.0.1:6650: 2 ranges x 16 lanes",
        "stalled", "1,234", "12.3 s", "the handler has not returned for 9.0 s",
        "t-partition-0", "77", "3 / 10,000", "4 / 4,000", "no consumer: 0-32767", "- / -",
        "parked: 'bad' and 7 more", "(handler, for 9 s)",
        "runbook for handler: docs/runbook.md#keyshardstalledhandler",
    ):  # fmt: skip
        assert text in out


def test_the_age_of_the_backlog_that_the_broker_measured_is_marked_as_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    known = lag(rows=7, seconds=12.0, brokerSeconds=90.0)
    with Asked(status(lag=known, partitions=[partition_status(0, lag=known)])):
        code, out, _ = run(capsys, "status")
    assert code == 0
    assert "lag 7 rows, 12.0 s, 90 s as measured by the broker; up for" in out
    assert out.count("90 s as measured by the broker") == 2, "of the source, and of its partition"
    with Asked(status(lag=lag(brokerSeconds=0.0))):
        assert "lag 0 s as measured by the broker" in run(capsys, "status")[1]
    with Asked(status()):
        assert "as measured by the broker" not in run(capsys, "status")[1]


def test_unknown_numbers_of_the_broker_have_their_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Asked(BUSY):
        out = run(capsys, "status", "s")[1]
    assert out.endswith("\nnumbers of the broker are unknown (-): no admin_url\n")
    refused = "The role may not ask."
    known = partition_status(0, backlog=7, unknown="")
    told = status(
        partitions=[known, partition_status(1, unknown=refused), partition_status(2)],
        brokerError=refused,
    )
    for option in ("--all-ranges", "--summary"):
        with Asked(told):
            out = run(capsys, "status", option)[1]
        for reason in (refused, "no admin_url"):
            text = f"numbers of the broker for 1 of 3 topic partitions are unknown (-): {reason}"
            assert text in out.splitlines()
        assert f"broker facts are outdated: {refused}" in out
    with Asked(status(partitions=[partition_status(0, unknown=refused)], brokerError=refused)):
        assert "outdated" not in run(capsys, "status")[1], "there are none"
    with Asked(status(partitions=[known])):
        assert "unknown" not in run(capsys, "status")[1]


def test_a_name_that_does_not_run_is_answered_with_running_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Asked(BUSY):
        code, _, err = run(capsys, "status", "billing")
    assert code == 1
    assert "No running source of 'billing'" in err
    assert f"Running sources: pid {os.getpid()}: 's' on t at pulsar://a." in err


def test_status_as_json_is_the_answer_of_the_source(capsys: pytest.CaptureFixture[str]) -> None:
    with Asked(BUSY):
        code, out, _ = run(capsys, "status", "--json")
    assert (code, json.loads(out)) == (0, BUSY)


def test_status_watches_until_it_is_interrupted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise KeyboardInterrupt

    # Not the module's own sleep: threads of other tests may sleep, too.
    clock = SimpleNamespace(sleep=sleep, monotonic=lambda: 0.0)
    monkeypatch.setattr(watching, "time", clock)
    with Asked(BUSY) as source:
        code, out, _ = run(capsys, "status", "--watch", "--json")
    assert code == 0
    assert len(source.requests) == 3
    assert [json.loads(line) for line in out.splitlines()] == [BUSY] * 3


def test_a_watch_shows_rates_and_ends_with_a_sentence_when_the_source_stops(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds
        completed = int(now_s * 1_000)
        source.told = status(
            counters=status()["counters"] | {"completed": completed},
            ranges=[range_status(0, state="running", handled=completed), range_status(1)],
        )
        if now_s == 3:
            source.server.close()

    monkeypatch.setattr(watching, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now_s))
    with Asked(status()) as source:
        code, out, err = run(capsys, "status", "--watch")
    assert code == 0
    assert err == f"The source of 's', pid {os.getpid()}, has stopped.\n"
    assert out.count("per second: received -, completed -,") == 1
    # Once it is a count, and twice a rate per second.
    assert out.count("completed 1,000, failed attempts 0") == 3
    assert "handled/s" in out


def test_rates_cover_a_few_statuses_and_restart_after_a_rescale() -> None:
    rates = watching.Rates()

    def count(told: Mapping[str, Any]) -> int | None:
        return told.get("count")

    for second in range(9):
        rates.look(float(second), {"epoch": 0, "count": second * second})
    assert rates.of(count) == (64 - 9) / 5
    assert rates.of(lambda _: None) is None
    rates.look(9.0, {"epoch": 1, "count": 0})
    assert rates.of(count) is None
    rates.look(9.0, {"epoch": 1, "count": 5})
    assert rates.of(count) is None, "no time has passed"


def test_a_watched_source_that_is_killed_is_called_gone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(_seconds: float) -> None:
        source.server._socket.close()  # a killed process leaves its name

    monkeypatch.setattr(watching, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: 0.0))
    with Asked(BUSY) as source:
        code, _, err = run(capsys, "status", "--watch")
    assert code == 1
    assert "crashed or was killed" in err


def test_every_command_names_a_missing_source(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for arguments in (
        ("status", "s"), ("explain", "k"), ("rescale", "3"),
        ("rescale", "3", "--dry-run"),
    ):  # fmt: skip
        code, out, err = run(capsys, *arguments)
        assert (code, out) == (1, "")
        assert err.startswith("[KEYSHARD_CONTROL] No running source")


def test_a_key_is_explained_without_a_source(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "explain", "order-17", "--parallelism", "10", "--json")
    assert code == 0
    slot = key_slot("order-17")
    assert json.loads(out) == {
        "key": "order-17", "slot": slot, "range": slot * 10 // 65_536, "hashRange": "32768-39321",
        "ifBytes": None,
    }  # fmt: skip


def test_a_key_that_may_have_been_set_as_bytes_has_two_places(
    capsys: pytest.CaptureFixture[str],
) -> None:
    key = b64encode(b"customer-0").decode()
    code, out, _ = run(capsys, "explain", key, "--parallelism", "10")
    assert code == 0
    for number in (key_slot(key), key_slot(b"customer-0")):
        assert f"slot {number}, range {number * 10 // 65_536}" in " ".join(
            out.replace("slot    ", "slot ").replace("\nrange   ", ", range ").split()
        )
    assert "if its producer set it as bytes" in out


def test_a_key_is_explained_by_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    told = {
        "key": "k", "slot": 5, "range": 0, "hashRange": "0-9", "owner": "here:1", "waiting": 3,
        "lane": {"state": "retrying", "messageId": "1:2:0", "attempts": 1, "reason": "no"},
        "parked": True,
    }  # fmt: skip
    with Asked(told) as source:
        code, out, _ = run(capsys, "explain", "k")
    assert code == 0
    assert source.requests == [{"do": "explain", "key": "k"}]
    for text in (
        "here:1",
        "retrying, message 1:2:0, attempt 2: no",
        "3 messages",
        "replay --key k",
    ):
        assert text in out


PARKED: dict[str, Any] = {
    "key": "k 1", "slot": 5, "range": 0, "hashRange": "0-9", "owner": "here:1", "waiting": 1,
    "lane": {"state": "empty", "messageId": None, "attempts": 0, "reason": None},
    "parked": True,
    "parkedBy": {
        "deadLetters": 2, "forSeconds": 7_300.0, "unknown": "",
        "message": {
            "topic": "persistent://public/default/t", "partition": 3, "messageId": "1:2:0",
            "attempts": 1, "error": "ValueError: no\x1b[2Jsuch\ncolour", "value": "{\"colour\": 1",
            "valueBytes": 5_000,
        },
    },
}  # fmt: skip


def test_the_reason_why_a_key_is_parked_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with Asked(PARKED):
        code, out, _ = run(capsys, "explain", "k 1")
    assert code == 0
    assert "waiting 1 message\n" in out
    assert out.endswith(
        "parked  yes: keyshard dead-letters replay --key 'k 1'\n"
        "        2 dead letters, the first 2.0 h old\n"
        "because message 1:2:0 of persistent://public/default/t, partition 3, failed once: "
        "ValueError: no?[2Jsuch colour\n"
        "content '{\"colour\": 1'... (5,000 bytes)\n"
    )


@pytest.mark.parametrize(
    ("value", "length", "says"),
    [
        (None, None, "too large for a single dead letter"), (None, 0, "none"), ("", 0, "empty"),
        ("abc", 3, "'abc'"),
    ],
)  # fmt: skip
def test_unknown_missing_and_empty_contents_are_told_apart(
    capsys: pytest.CaptureFixture[str], value: str | None, length: int | None, says: str
) -> None:
    by = PARKED["parkedBy"]
    message = by["message"] | {"value": value, "valueBytes": length}
    with Asked(PARKED | {"parkedBy": by | {"message": message}}):
        _, out, _ = run(capsys, "explain", "k 1")
    assert out.endswith(f"content {says}\n")


def test_a_dead_letter_that_cannot_be_read_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    by = {"deadLetters": 1, "forSeconds": None, "message": None, "unknown": "the broker is away"}
    with Asked(PARKED | {"parkedBy": by}):
        code, out, _ = run(capsys, "explain", "k 1")
    assert code == 0
    assert out.endswith("        1 dead letter\n        cause unknown: the broker is away\n")


def test_several_sources_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "ps")[:2] == (0, "No source runs, and no sink is open.\n")
    with Asked(BUSY, "billing"), Asked(BUSY, "reports"):
        for command in ("ps", "status"):
            code, out, err = run(capsys, command)
            assert code == 0
            for name in ("billing", "reports"):
                assert sum(f"{os.getpid()}" in line and name in line for line in out.splitlines())
            assert ("keyshard status SUBSCRIPTION" in err) is (command == "status")
        code, out, _ = run(capsys, "ps", "--json")
        assert [one["subscription"] for one in json.loads(out)] == ["billing", "reports"]
        code, out, _ = run(capsys, "status", "billing")
        assert "running: 's' on" in out
        for option in ("--json", "--watch"):
            assert run(capsys, "status", option)[0] == 1, "one status has one source"


def test_the_list_shows_lag_uptime_and_the_newest_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    late = status(
        lag=lag(rows=1_234, seconds=5.25, trend="growing"),
        rates={"received": 81.0, "completed": None, "failedAttempts": None},
        uptimeSeconds=3_725.0,
        newestError={"error": "ValueError: no", "secondsAgo": 61.0},
    )
    with Asked(late, "billing"), Asked({"state": "running"}, "reports"):
        code, out, _ = run(capsys, "status")
    assert code == 0
    first = next(line for line in out.splitlines() if "billing" in line)
    for text in ("handlers", "running", "81", "1,234 rows, 5.2 s, growing", "1 h 2 min"):
        assert text in first, text
    assert "ValueError: no (1 min 1 s ago)" in first
    other = next(line for line in out.splitlines() if "reports" in line)
    assert "cannot be understood" in other


def test_texts_of_messages_reach_no_terminal_as_they_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The error of a handler may quote a value that moves the cursor or renames the window."""
    evil = "ValueError: \x1b[2J\x1b]0;x\x07gone"
    newest = {"error": evil, "secondsAgo": 1.0}
    stalled = {"reason": evil, "kind": evil, "forSeconds": 9.0}
    shown = status(
        newestError=newest,
        circuit={**present(status()["circuit"]), "state": "open", "error": evil},
        ranges=[range_status(0, state="stalled", stalled=stalled), range_status(1, reason=evil)],
        partitions=[partition_status(0, error=evil)],
    )
    with Asked(shown):
        code, out, _ = run(capsys, "status", "s")
    assert code == 0
    assert out.count("gone") >= 5
    with Asked(shown, "billing"), Asked(status(newestError=newest), "reports"):
        out += run(capsys, "status")[1]
    assert "\x1b" not in out
    assert "\x07" not in out


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.9, "60 s"), (61, "1 min 1 s"), (7_260, "2 h 1 min"), (90_000, "1 d 1 h")],
)
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


MANY = status(
    ranges=[range_status(0, state="stalled", waiting=7)]
    + [range_status(index, state="running", inFlight=2) for index in range(1, 1_000)],
    partitions=[partition_status(index, backlog=3) for index in range(100)],
)


def test_a_thousand_ranges_are_a_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with Asked(MANY):
        lines = run(capsys, "status")[1].splitlines()
        assert len(lines) < 15
        assert sum("stalled" in line for line in lines) == 3, "counted twice, and in the table"
        assert any(
            "1,000 ranges: 1 stalled, 999 running; waiting 7, in flight 1,998" in line
            for line in lines
        )
        assert any(
            "100 topic partitions: backlog 300, 0 with slots without" in line for line in lines
        )
        assert len(run(capsys, "status", "--all-ranges")[1].splitlines()) > 1_100
    with Asked(status(ranges=[range_status(index, state="blocked") for index in range(60)])):
        out = run(capsys, "status")[1]
        assert "60 ranges: 60 blocked; waiting 0, in flight 0; the first 10 of 60 in trouble" in out
        assert len(out.splitlines()) < 30
    with Asked(BUSY):
        assert "2 ranges: 1 stalled, 1 running" in run(capsys, "status", "--summary")[1]


@pytest.mark.parametrize(("backlogs", "shown"), [((3, 4), "7"), ((3, None), "-")])
def test_the_backlog_of_a_summary_is_unknown_if_one_is(
    capsys: pytest.CaptureFixture[str], backlogs: tuple[int | None, ...], shown: str
) -> None:
    partitions = [partition_status(at, backlog=count) for at, count in enumerate(backlogs)]
    with Asked(status(partitions=partitions)):
        assert f"backlog {shown}, " in run(capsys, "status", "--summary")[1]


def test_stalled_topic_partitions_are_named_also_in_a_summary(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stalled = {"forSeconds": 12.4, "kind": "look-ahead", "reason": "the broker reads nothing"}
    partitions = [partition_status(number, stalled=stalled) for number in range(7)]
    partitions += [partition_status(number) for number in range(7, 60)]
    with Asked(status(partitions=partitions)):
        out = run(capsys, "status")[1]
    assert out.count("is stalled for 12 s: the broker reads nothing (look-ahead)") == 5
    assert out.count("runbook for look-ahead: docs/runbook.md#keyshardstalledlookahead") == 1
    assert "t-partition-0 is stalled for 12 s" in out
    assert "2 more topic partitions are stalled" in out
    assert "60 topic partitions: backlog -, 0 with slots without a consumer, 7 stalled" in out


def test_rescale_is_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    told = {
        "epoch": 1, "ranges_before": 10, "ranges_after": 11, "moved_fraction": 0.0909,
        "optimum_fraction": 0.0909, "pauses": [{"pause_ms": 12.0}, {"pause_ms": 120.4}],
    }  # fmt: skip
    with Asked(told) as source:
        code, out, _ = run(capsys, "rescale", "11", "--subscription", "s")
        assert code == 0
        assert "10 ranges to 11: 9.1% of the ring moved, at least 9.1% were necessary" in out
        assert "longest pause of a range 120 ms" in out
        assert json.loads(run(capsys, "rescale", "--balance", "--json")[1]) == told
        code, _, err = run(capsys, "rescale")
        assert code == 2
        assert "--balance" in err
    assert source.requests == [
        {"do": "rescale", "ranges": 11, "balance": False},
        {"do": "rescale", "ranges": None, "balance": True},
    ]


def test_past_and_running_rescales_are_shown_by_phase(capsys: pytest.CaptureFixture[str]) -> None:
    history = History()
    rescales = history.rescales
    now_s = time.monotonic()
    running = rescales.begins(Rescale({"ranges": 8}, 4, 8, now_s - 9.0, 60.0))
    running.phase_begins(now_s - 8.0, "drain")
    running.phase_begins(now_s - 5.0, "subscribe")
    rescales.ends(
        running, now_s - 4.75, RescaleEnd.MOVED, epoch=1, moved_fraction=0.5, pause_ms=3_200.0
    )
    running = rescales.begins(Rescale({"balance": True}, 8, 8, now_s - 4.0, 60.0))
    rescales.ends(
        running, now_s - 3.0, RescaleEnd.KEPT, epoch=1, error="No range moved: [red]\x1b[31mx"
    )
    running = rescales.begins(Rescale({"ranges": 3}, 8, 3, now_s - 2.0, 60.0))
    running.phase_begins(now_s - 2.0, "drain")
    running.drain_waits({"key": "a\x1b[31m", "messageId": "1:2:0", "runningSeconds": 90.0})
    with Asked(status(history=history.status(now_s))):
        code, out, _ = run(capsys, "rescale", "--history")
        told = json.loads(run(capsys, "rescale", "--history", "--json")[1])
    assert code == 0
    lines = " ".join(out.split())
    assert "from 8 to 3 ranges has run for 2 s: drain 2.0 s. It waits at most 60 s, for" in lines
    assert "message 1:2:0 of key 'a" in lines
    assert "whose handler has run for 1 min 30 s." in lines
    assert "8 ranges 4 to 8 moved 50.0% 4.2 s drain 3.0 s, subscribe 250 ms 3.2 s" in lines
    assert "balance 8 to 8 kept 0.0% 1.0 s" in lines
    assert "No range moved: [red]" in lines
    assert "1 moved, 1 kept. Those that moved slots took 4.2 s on average" in lines
    assert "\x1b" not in out
    assert told.keys() == {"rescales", "rescaling", "rescaleSummary"}


def test_a_rescale_of_actors_names_actors(capsys: pytest.CaptureFixture[str]) -> None:
    history = History()
    now_s = time.monotonic()
    running = history.rescales.begins(Rescale({"actors": 3}, 2, 3, now_s - 9.0, 30.0))
    running.phase_begins(now_s - 8.0, "start")
    history.rescales.ends(running, now_s, RescaleEnd.MOVED, epoch=0, pause_ms=1.0)
    history.rescales.begins(Rescale({"actors": 1}, 3, 1, now_s - 2.0, 30.0))
    with Asked(status(history=history.status(now_s))):
        code, out, _ = run(capsys, "rescale", "--history")
    assert code == 0
    lines = " ".join(out.split())
    assert "A rescale from 3 to 1 actors has run for 2 s" in lines
    assert "3 actors 2 to 3 moved 0.0% 9.0 s start 8.0 s" in lines


def test_a_history_of_rescales_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Asked(status(history=None)) as source:
        for arguments in (("8",), ("--balance",), ("--dry-run",)):
            code, _, err = run(capsys, "rescale", "--history", *arguments)
            assert code == 2
            assert "--history changes nothing" in err
        assert source.requests == []
        code, _, err = run(capsys, "rescale", "--history")
        assert code == 1
        assert "still starting" in err


def test_a_dry_run_of_a_rescale_needs_no_source(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (
        "rescale", "11", "--dry-run", "--from", "10", "--handler-ms", "10", "--lanes", "4",
    )  # fmt: skip
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    assert "10 ranges to 11: 9.1% of the ring moves in 10 pieces; the optimum is 9.1%" in out
    code, out, _ = run(capsys, *arguments, "--json")
    told = json.loads(out)
    assert told["movedFraction"] == pytest.approx(1 / 11, abs=2e-4)
    assert len(told["moves"]) == 10
    assert told["ceiling"]["after"] == {"keys": 44, "rowsPerSecond": 4_400.0, "limitedBy": "lanes"}


def test_options_of_a_dry_run_are_refused_without_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for arguments, says in (
        (("rescale", "4", "--lanes", "2"), "--lanes needs --dry-run"),
        (("rescale", "--balance", "--dry-run"), "depend on the load"),
    ):
        code, out, err = run(capsys, *arguments)
        assert (code, out) == (2, "")
        assert says in err


def test_a_plan_from_a_running_source_uses_its_measurements(
    capsys: pytest.CaptureFixture[str],
) -> None:
    timings = LatencyHistogram()
    for seconds in (0.01, 0.03):
        timings.add(seconds)
    with Asked(status(handlerSeconds=timings.status())):
        code, out, _ = run(capsys, "rescale", "4", "--dry-run", "--json")
    assert code == 0
    told = json.loads(out)
    assert (told["rangesBefore"], told["movedFraction"]) == (2, 0.5)
    assert told["handlerSeconds"] == pytest.approx(0.02)
    # Its 4 workers are fewer than 4 x 16 lanes.
    assert told["ceiling"]["after"] == {"keys": 4, "rowsPerSecond": 200.0, "limitedBy": "workers"}
    with Asked(status(kind="ray", handlerSeconds=timings.status())):
        _, out, _ = run(capsys, "rescale", "4", "--dry-run", "--json")
    assert json.loads(out)["handlerSeconds"] is None, "an attempt of an actor may have many rows"
