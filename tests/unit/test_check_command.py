"""``keyshard check`` prints every verdict, and its exit status sums them up."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from keyshard.testing.verify.history import Event, HistoryWriter
from tests.support.command_line import run as command
from tests.support.error_text import has_error_form
from tests.support.histories import TOPIC, batch_host

LOST = Event(99.0, "sent", topic=TOPIC, key="[k]", seq=0)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    return command(capsys, "check", *arguments)


def written(path: Path, events: Iterable[Event]) -> str:
    with HistoryWriter(path) as history:
        history.write_all(events)
    return str(path)


@pytest.fixture
def good(tmp_path: Path) -> str:
    return written(tmp_path / "good.jsonl", batch_host())


@pytest.fixture
def bad(tmp_path: Path) -> str:
    return written(tmp_path / "bad.jsonl", [*batch_host(), LOST])


def test_every_verdict_is_printed(capsys: pytest.CaptureFixture[str], good: str) -> None:
    code, out, err = run(capsys, good)
    assert (code, err) == (0, "")
    lines = {line.strip().split("  ")[0]: line for line in out.splitlines()}
    assert "holds" in lines["no loss"]
    assert "60 messages sent." in lines["no loss"]
    assert "not checked" in lines["one handler per key"]
    assert "no handler started" in " ".join(out.split())
    assert out.count(" holds ") == 10


def test_a_broken_promise_is_status_1_and_shows_its_events(
    capsys: pytest.CaptureFixture[str], bad: str
) -> None:
    code, out, _ = run(capsys, bad)
    assert code == 1
    assert out.count("BROKEN") == 3
    assert "\nno loss: 1 violation in 61 messages sent; the first: " in out
    assert f"{TOPIC} key '[k]' seq 0 was sent, but never done.\n  {LOST.to_json()}\n" in out


def test_json_has_every_verdict_and_its_offending_events(
    capsys: pytest.CaptureFixture[str], good: str, bad: str
) -> None:
    code, out, _ = run(capsys, good, "--json")
    result = json.loads(out)
    assert (code, result["holds"], len(result["verdicts"])) == (0, True, 11)
    assert "live" not in result
    code, out, _ = run(capsys, bad, "--json")
    result = json.loads(out)
    assert (code, result["holds"]) == (1, False)
    assert result["verdicts"][0]["offending"][0]["key"] == "[k]"


def test_limits_are_options(capsys: pytest.CaptureFixture[str], good: str) -> None:
    assert run(capsys, good, "--deliveries-max", "1")[0] == 1
    assert run(capsys, good, "--liveness-s", "0.000001")[0] == 0


def test_an_invalid_history_is_status_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, good: str
) -> None:
    empty, torn = tmp_path / "empty.jsonl", tmp_path / "torn.jsonl"
    empty.write_text("")
    torn.write_text(Path(good).read_text()[:-5])
    for path, text in [
        (str(tmp_path / "nowhere"), "cannot be read: No such file"),
        (str(tmp_path), "cannot be read: Is a directory"),
        (str(empty), "contains no events to check"),
        (str(torn), "is not an event"),
        (str(Path(__file__)), "Line 1 of"),
    ]:
        code, out, err = run(capsys, path)
        assert (code, out) == (2, "")
        assert err.startswith("[KEYSHARD_HISTORY_INVALID] ")
        assert text in err
        assert has_error_form(err), err


def test_bad_input_is_one_error_and_status_2(capsys: pytest.CaptureFixture[str], good: str) -> None:
    for arguments, text in [
        ((), "Name a history file, or record one with --live"),
        ((good, "--live"), "Name a history file, or record one with --live"),
        ((good, "--history", "x"), "To check a file, name it without --history"),
        (("--live",), "--live needs a topic"),
        (("--live", "--topic", "t", "--history", good), "exists.\nRemedy: Name a new file"),
        (("--live", "--topic", "t", "--keys", "0"), "keys is 0; it must be from 1"),
        (("--live", "--topic", "t", "--parallelism", "0"), "parallelism is 0"),
        (("--live", "--topic", "a/b"), "is not a topic name"),
        (("--live", "--topic", "t", "--timeout-s", "0"), "timeout_s is 0"),
        (("--live", "--topic", "t", "--service-url", "x"), "--service-url is 'x'"),
        (
            ("--live", "--topic", "t", "--service-url", "pulsar://h:1", "--partitions", "2"),
            "needs the admin interface",
        ),
    ]:
        code, out, err = run(capsys, *arguments)
        assert (code, out) == (2, "")
        assert err.startswith("[KEYSHARD_BAD_OPTION] ")
        assert text in err
        assert has_error_form(err), err


def test_a_broker_that_is_not_there_gives_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--live", "--topic", "t", "--admin-url", "http://127.0.0.1:1")
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("[KEYSHARD_BROKER_UNAVAILABLE] ")
