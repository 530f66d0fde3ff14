"""``keyshard status``, ``explain``, ``unpark``, ``rescale`` and ``plan``."""

from __future__ import annotations

import io
import json
import os
from base64 import b64encode
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from command_line import run
from control_folder import own_control_folder
from keyshard.cli import watching
from keyshard.core.lanes.timings import Timings
from keyshard.core.ring.key_slot import key_slot
from keyshard.observe.control import ControlServer
from statuses import partition_status, range_status, status


@pytest.fixture(autouse=True)
def folder() -> Iterator[None]:
    with own_control_folder():
        yield


class Asked:
    """A source that answers with what the test gives, and remembers what it was asked."""

    def __init__(self, told: Mapping[str, Any], subscription: str = "s") -> None:
        self.told = told
        self.requests: list[Mapping[str, Any]] = []
        names = ("status", "explain", "unpark", "discard", "count_letters", "rescale")
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
            stalled={"forSeconds": 9.0, "reason": "the handler has not returned for 9.0 s: key"},
        ),
        range_status(1, hashRanges=["32768-65535"], state="running"),
    ],
    partitions=[
        partition_status(0, backlog=77, ackHoles=3, ackHolesMax=10_000, replay=4, replayMax=4_000),
        partition_status(1, covered=False, gaps=["0-32767"]),
    ],
    parkedKeys=8,
    parked=[{"key": "bad", "letters": 2}],
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
        "t-partition-0", "77", "3 / 10,000", "4 / 4,000", "gaps: 0-32767", "- / -",
        "parked: 'bad' and 7 more",
    ):  # fmt: skip
        assert text in out


def test_a_name_that_does_not_run_is_answered_with_what_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Asked(BUSY):
        code, _, err = run(capsys, "status", "billing")
    assert code == 1
    assert "No running source of 'billing'" in err
    assert f"What does run: pid {os.getpid()}: 's' on t at pulsar://a." in err


def test_status_as_json_is_what_the_source_tells(capsys: pytest.CaptureFixture[str]) -> None:
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
    assert out.count("completed 1,000, failed attempts 0") == 3  # a count once, a pace twice
    assert "handled/s" in out


def test_rates_are_taken_over_some_looks_and_anew_after_a_rescale() -> None:
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
        source.server._socket.close()  # what a process that is killed leaves: its name

    monkeypatch.setattr(watching, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: 0.0))
    with Asked(BUSY) as source:
        code, _, err = run(capsys, "status", "--watch")
    assert code == 1
    assert "is gone without having stopped" in err


def test_without_a_running_source_every_command_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for arguments in (
        ("status", "s"), ("explain", "k"), ("unpark", "k"), ("rescale", "3"),
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
    for text in ("here:1", "retrying, message 1:2:0, attempt 2: no", "3 messages", "unpark k"):
        assert text in out


PARKED = {
    "key": "k 1", "slot": 5, "range": 0, "hashRange": "0-9", "owner": "here:1", "waiting": 1,
    "lane": {"state": "empty", "messageId": None, "attempts": 0, "reason": None},
    "parked": True,
    "parkedBy": {
        "letters": 2, "forSeconds": 7_300.0, "unknown": "",
        "message": {
            "topic": "persistent://public/default/t", "partition": 3, "messageId": "1:2:0",
            "attempts": 1, "error": "ValueError: no\x1b[2Jsuch\ncolour", "value": "{\"colour\": 1",
            "valueBytes": 5_000,
        },
    },
}  # fmt: skip


def test_the_reason_why_a_key_is_parked_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with Asked(PARKED):
        code, out, _ = run(capsys, "explain", "k 1")
    assert code == 0
    assert "waiting 1 message\n" in out
    assert out.endswith(
        "parked  yes: keyshard unpark 'k 1'\n"
        "        2 dead letters, the first 2.0 h old\n"
        "because message 1:2:0 of persistent://public/default/t, partition 3, failed once: "
        "ValueError: no?[2Jsuch colour\n"
        "content '{\"colour\": 1'... (5,000 bytes)\n"
    )


def test_a_dead_letter_that_cannot_be_read_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    by = {"letters": 1, "forSeconds": None, "message": None, "unknown": "the broker is away"}
    with Asked(PARKED | {"parkedBy": by}):
        code, out, _ = run(capsys, "explain", "k 1")
    assert code == 0
    assert out.endswith("        1 dead letter\n        why is not known: the broker is away\n")


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        (["--all"], {"all": True}),
        (["--rejected"], {"all": True, "rejected": True}),
        (["--topic", "t"], {"topic": "t"}),
        (["--rejected", "--older-than", "2h"], {"rejected": True, "older_than_s": 7_200.0}),
    ],
)
def test_dead_letters_of_several_keys_are_given_up_only_when_somebody_agrees(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    fields: dict[str, Any],
) -> None:
    count, discard = {"do": "count_letters", **fields}, {"do": "discard", **fields}
    with Asked({"letters": 12}) as source:
        monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
        code, out, err = run(capsys, "discard", *arguments)
        assert (code, out) == (2, ""), "there is no terminal to ask at"
        assert "gives 12 dead letters of 's' up for good" in err
        assert "--yes" in err
        monkeypatch.setattr("sys.stdin", Terminal("n\n"))
        code, out, err = run(capsys, "discard", *arguments)
        assert (code, out.strip()) == (1, "")
        assert "Give 12 dead letters of 's' up for good? [y/N]" in err
        assert source.requests == [count, count]
        monkeypatch.setattr("sys.stdin", Terminal("y\n"))
        code, out, _ = run(capsys, "discard", *arguments, "--json")
        assert (code, json.loads(out)) == (0, {"letters": 12})
        assert source.requests[2:] == [count, discard]
        assert run(capsys, "discard", *arguments, "--yes")[0] == 0
        assert source.requests[4:] == [discard]
        assert run(capsys, "discard", "k")[0] == 0, "one key that is named needs no asking"
        assert source.requests[5:] == [{"do": "discard", "key": "k"}]


def test_no_dead_letter_needs_no_asking(capsys: pytest.CaptureFixture[str]) -> None:
    with Asked({"letters": 0}):
        code, out, _ = run(capsys, "discard", "--all")
    assert (code, out) == (0, "0 dead letters given up for good.\n")


class Terminal(io.StringIO):
    """Answers of a person."""

    def isatty(self) -> bool:
        return True


def test_several_sources_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "ps")[:2] == (0, "No source runs.\n")
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


MANY = status(
    ranges=[range_status(0, state="stalled", waiting=7)]
    + [range_status(index, state="running", inFlight=2) for index in range(1, 1_000)],
    partitions=[partition_status(index, backlog=3) for index in range(100)],
)


def test_a_thousand_ranges_are_a_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with Asked(MANY):
        lines = run(capsys, "status")[1].splitlines()
        assert len(lines) < 15
        assert sum("stalled" in line for line in lines) == 2, "counted, and in the table"
        assert any(
            "1,000 ranges: 1 stalled, 999 running; waiting 7, in flight 1,998" in line
            for line in lines
        )
        assert any("100 topic partitions: backlog 300, 0 with gaps" in line for line in lines)
        assert len(run(capsys, "status", "--all-ranges")[1].splitlines()) > 1_100
    with Asked(status(ranges=[range_status(index, state="blocked") for index in range(60)])):
        out = run(capsys, "status")[1]
        assert "60 ranges: 60 blocked; waiting 0, in flight 0; the first 10 of 60 in trouble" in out
        assert len(out.splitlines()) < 30
    with Asked(BUSY):
        assert "2 ranges: 1 stalled, 1 running" in run(capsys, "status", "--summary")[1]


def test_unpark_is_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    for parked, says in ((True, "is on its way out"), (False, "is not parked")):
        with Asked({"parked": parked}) as source:
            code, out, _ = run(capsys, "unpark", "k")
        assert (code, source.requests) == (0, [{"do": "unpark", "key": "k"}])
        assert says in out


def test_rescale_is_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    told = {
        "epoch": 1, "ranges_before": 10, "ranges_after": 11, "moved_fraction": 0.0909,
        "optimum_fraction": 0.0909, "pauses": [{"pause_ms": 12.0}, {"pause_ms": 120.4}],
    }  # fmt: skip
    with Asked(told) as source:
        code, out, _ = run(capsys, "rescale", "11", "--subscription", "s")
        assert code == 0
        assert "10 ranges to 11: 9.1% of the ring moved, and at least 9.1% had to" in out
        assert "longest pause of a range 120 ms" in out
        assert json.loads(run(capsys, "rescale", "--balance", "--json")[1]) == told
        code, _, err = run(capsys, "rescale")
        assert code == 2
        assert "--balance" in err
    assert source.requests == [
        {"do": "rescale", "ranges": 11, "balance": False},
        {"do": "rescale", "ranges": None, "balance": True},
    ]


def test_a_plan_without_a_source(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (
        "rescale", "11", "--dry-run", "--from", "10", "--handler-ms", "10", "--lanes", "4",
    )  # fmt: skip
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    assert (
        "10 ranges to 11: 9.1% of the ring moves in 10 pieces; no plan moves less than 9.1%" in out
    )
    code, out, _ = run(capsys, *arguments, "--json")
    told = json.loads(out)
    assert told["movedFraction"] == pytest.approx(1 / 11, abs=2e-4)
    assert len(told["moves"]) == 10
    assert told["ceiling"]["after"] == {"keys": 44, "rowsPerSecond": 4_400.0, "limitedBy": "lanes"}


def test_what_only_a_dry_run_takes_is_refused_without_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for arguments, says in (
        (("rescale", "4", "--lanes", "2"), "--lanes goes with --dry-run only"),
        (("rescale", "--balance", "--dry-run"), "decided by the load"),
    ):
        code, out, err = run(capsys, *arguments)
        assert (code, out) == (2, "")
        assert says in err


def test_a_plan_from_a_running_source_uses_what_it_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    timings = Timings()
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
