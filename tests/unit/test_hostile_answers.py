"""Commands that read foreign data: a source that answers nonsense, an invalid history.

They end with a verdict, a result, or one error with a code.
"""

from __future__ import annotations

import copy
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from keyshard.cli import main
from keyshard.control import ControlServer
from keyshard.observe import dead_letter_requests, monitor
from tests.helpers import DEADLINE_S
from tests.support.command_line import run
from tests.support.control_folder import own_control_folder
from tests.support.error_text import has_error_form
from tests.support.histories import batch_host
from tests.support.statuses import partition_status, range_status, status

SEEDS = 30
DEEP = "[" * 100_000
HOSTILE: list[Any] = [
    None, True, -1, 2**70, 10**400, 1e308, float("inf"), float("nan"), "", "\ud800", "k\udcff",
    "[bold]x[/]", "[/]", "\x1b[2J\x00", "x" * 10_000, [], [[]], {}, {"a": {"b": []}}, [None],
]  # fmt: skip


@pytest.fixture(autouse=True)
def folder() -> Iterator[Path]:
    with own_control_folder() as made:
        yield made


def spoiled(random: Random, value: Any, times: int = 2) -> Any:
    """A copy with something in it replaced, removed or added."""
    made = copy.deepcopy(value)
    for _ in range(times):
        at = made
        while True:
            names: list[Any] = []
            if isinstance(at, dict):
                names = list(at)
            elif isinstance(at, list):
                names = list(range(len(at)))
            if not names:
                break
            name = random.choice(names)
            if not isinstance(at[name], (dict, list)) or random.random() < 0.3:
                if random.random() < 0.2:
                    del at[name]
                else:
                    at[name] = random.choice(HOSTILE)
                break
            at = at[name]
    return made


STATUS = status(
    ranges=[
        range_status(0, stalled={"forSeconds": 9.0, "reason": "why"}),
        range_status(
            1, blockedBy={"key": "k", "messageId": "5:6:0", "attempts": 2, "reason": "why"}
        ),
    ],
    partitions=[partition_status(0), partition_status(1, covered=False, gaps=["0-9"])],
    parked=[{"key": "k", "deadLetters": 3}],
)
EXPLAINED = {
    "key": "k", "slot": 5, "range": 0, "hashRange": "0-9", "owner": "here:1", "waiting": 3,
    "ifBytes": {"slot": 6, "range": 0, "hashRange": "0-9"},
    "lane": {"state": "retrying", "messageId": "1:2:0", "attempts": 1, "reason": "no"},
    "parked": True,
}  # fmt: skip
RESCALED = {"ranges": 2}
LISTED: dict[str, Any] = {
    "deadLetters": [{
        "kind": "parked", "topic": "t", "partition": 3, "messageId": "1:2:0", "key": "k",
        "error": "ValueError", "reason": "ValueError: no", "attempts": 8, "ageSeconds": 7.0,
        "bytes": 12,
    }],
    "examined": 1, "next": None,
}  # fmt: skip
SHOWN = {
    "publishTime": "2024", "eventTime": None, "writtenAt": "2024", "properties": {"a": "b"},
    "value": "eA==",
}  # fmt: skip
DECODED = {"type": "AVRO", "version": 1, "text": "7", "problem": "It is cut."}
STACKS = {
    "runs": [{
        "key": "k", "range": 0, "topic": "t", "partition": 0, "messageId": "1:2:3", "attempts": 0,
        "state": "running", "runningSeconds": 1.5, "retryInSeconds": None, "error": "",
    }],
    "stack": ['File "a.py", line 1, in handle', "  wait()"],
}  # fmt: skip
PLAN = {
    "keys": 1, "deadLetters": 1, "matching": 1,
    "first": [{"key": "k", "deadLetters": 1, "matching": 1}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("output", "command"),
    [
        (STATUS, ("status",)),
        (STATUS, ("status", "--json")),
        (STATUS, ("rescale", "4", "--dry-run")),
        (EXPLAINED, ("explain", "k")),
        (STACKS, ("stacks",)),
        (STACKS, ("stacks", "--json")),
        (LISTED, ("dead-letters", "list")),
        (LISTED["deadLetters"][0] | SHOWN, ("dead-letters", "show", "1:2:3")),
        (
            LISTED["deadLetters"][0] | SHOWN | {"decoded": DECODED},
            ("dead-letters", "show", "1:2:3", "--format", "schema"),
        ),
        (PLAN, ("dead-letters", "replay", "--key", "k")),
        (PLAN, ("dead-letters", "replay", "--all")),
        (PLAN, ("dead-letters", "discard", "--topic", "t", "--dry-run")),
        (RESCALED, ("rescale", "4")),
    ],
)
def test_a_source_that_answers_nonsense_is_one_error(
    capsys: pytest.CaptureFixture[str], output: Any, command: tuple[str, ...]
) -> None:
    random = Random(f"{command}")
    answer: list[Any] = [output]
    names = (
        "status", "explain", "unpark", "discard", "dead_letters", "dead_letter", "rescale",
        "runs", "stack",
    )  # fmt: skip
    server = ControlServer("s", "pulsar://a", "t", dict.fromkeys(names, lambda _: answer[0]))
    try:
        for seed in range(SEEDS):
            answer[0] = spoiled(random, output) if seed else random.choice(HOSTILE)
            code, out, err = run(capsys, *command)
            assert "Traceback" not in out + err, answer[0]
            if code:
                assert err.startswith("[KEYSHARD_"), (answer[0], err)
                assert has_error_form(err), err
    finally:
        server.close()


@contextmanager
def answering(folder: Path, said: bytes) -> Iterator[None]:
    """A server at the address of a source, with arbitrary answers."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(folder / f"00000000-00000000-{os.getpid()}-0000"))
        listening.listen(8)

        def answer() -> None:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection:
                connection.recv(64 * 1024)
                connection.sendall(said)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(DEADLINE_S)


@pytest.mark.parametrize(
    "said",
    [
        b"\n", b"{}\n", b"[]\n", b"7\n", b"nonsense\n", b"\xff\xfe\n", b"\x00" * 100 + b"\n", b"",
        DEEP.encode() + b"\n", b'{"ok": true, "result": ' + b"9" * 5_000 + b"}\n",
        b'{"ok": true}\n', b'{"ok": true, "result": null}\n', b'{"ok": true, "result": []}\n',
        b'{"ok": true, "result": {"subscription": 1, "serviceUrl": 2, "topics": 3, "pid": "x"}}\n',
        b'{"ok": true, "result": {"subscription": "s", "serviceUrl": "u", "topics": "t"}}\n',
        b'{"ok": false}\n', b'{"ok": false, "code": [], "error": {}}\n',
        b'{"ok": false, "code": "KEYSHARD_BAD_OPTION", "error": 7}\n',
        b'{"ok": false, "code": "KEYSHARD_BAD_OPTION", "error": "\\ud800"}\n',
    ],
    ids=lambda said: repr(said[:40]),
)  # fmt: skip
def test_a_socket_that_answers_garbage_is_one_error(
    capsys: pytest.CaptureFixture[str], folder: Path, said: bytes
) -> None:
    folder.mkdir(0o700)
    with answering(folder, said):
        code, out, err = run(capsys, "status")
    assert (code, out) in ((1, ""), (2, ""))
    assert err.startswith("[KEYSHARD_"), err
    assert has_error_form(err), err


def test_a_source_whose_status_is_nothing_plans_no_rescale(
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = ControlServer("s", "pulsar://a", "t", {"status": lambda _: None})
    try:
        code, out, err = run(capsys, "rescale", "4", "--dry-run")
    finally:
        server.close()
    assert (code, out) == (1, "")
    assert err.startswith("[KEYSHARD_CONTROL]")


@pytest.mark.parametrize(
    "command",
    [
        ("broker", "stop", "--data", "k\udcff"),
        ("broker", "status", "--data", "loop"),
        ("broker", "logs", "--data", "a" * 300),
        ("broker", "logs", "--data", "."),
        ("produce", "k\udcff"),
        ("check", "--live", "--topic", "t", "--history", "a" * 300),
    ],
    ids=lambda command: " ".join(command)[:30].encode(errors="replace").decode(),
)
def test_names_that_nothing_can_have_are_one_error(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KEYSHARD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "broker.log").mkdir()
    code, out, err = run(capsys, *command)
    assert code in (1, 2)
    assert out == ""
    assert err.startswith("[KEYSHARD_"), err
    assert has_error_form(err), err


def _hostile_line(random: Random, events: list[dict[str, Any]]) -> str:
    event = spoiled(random, random.choice(events), 1)
    text = json.dumps(event)
    return random.choice(
        [
            text, text, text, DEEP, "[" * 500 + "]" * 500, text[: random.randrange(len(text))],
            text.replace('"t": ', '"t": ' + "9" * random.choice([10, 400, 5_000])),
            '{"t": 1e999, "kind": "faults_stopped"}', "\x00", "null", "[1]", '"text"',
            '{"t": 1, "kind": ' + DEEP,
            '{"t": 1, "kind": "sent", "topic": "t", "key": "\\ud800", "seq": 1}',
        ]
    )  # fmt: skip


def test_a_history_of_anything_has_verdicts_or_one_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    random = Random("history")
    events = [json.loads(event.to_json()) for event in batch_host()]
    path = tmp_path / "history.jsonl"
    for _ in range(SEEDS):
        lines = [json.dumps(event) for event in events]
        for _ in range(random.randint(1, 3)):
            lines.insert(random.randrange(len(lines)), _hostile_line(random, events))
        path.write_text("\n".join(lines), encoding="utf-8")
        code, out, err = run(capsys, "check", str(path), *random.choice([(), ("--json",)]))
        assert "Traceback" not in out + err
        if code == 2:
            assert err.startswith("[KEYSHARD_HISTORY_INVALID] "), err
            assert has_error_form(err), err
            assert len(err) < 3_000, err[:200]
        else:
            assert code in (0, 1), (code, err)


def test_a_key_that_is_no_utf_8_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """Argument bytes that are not UTF-8 come as lone surrogates; they ended the running source."""
    code, out, _ = run(capsys, "explain", "k\udcff", "--parallelism", "4")
    assert (code, "slot" in out) == (0, True)
    with pytest.raises(SystemExit):
        main(["explain", "k", "--subscription", "s\udcff"])
    assert capsys.readouterr().err.startswith("[KEYSHARD_CONTROL] No running source")


def test_a_source_looks_for_a_key_as_the_broker_reads_it() -> None:
    asked = json.loads(json.dumps({"key": "k\udcff"}))
    assert monitor._key_of(asked) == "k\ufffd"
    assert dead_letter_requests._filter_of(asked).key == "k\ufffd"
