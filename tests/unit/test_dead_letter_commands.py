"""``keyshard dead-letters``: requests to a source, confirmations, tables and values."""

from __future__ import annotations

import io
import json
from base64 import b64encode
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from keyshard.control import ControlServer
from tests.support.command_line import run
from tests.support.control_folder import own_control_folder


@pytest.fixture(autouse=True)
def folder() -> Iterator[None]:
    with own_control_folder():
        yield


class Asked:
    """A source with answers of the test, one after the other; it records the requests."""

    def __init__(self, *told: Mapping[str, Any]) -> None:
        self.told = list(told)
        self.requests: list[Mapping[str, Any]] = []
        names = ("dead_letters", "dead_letter", "unpark", "discard")
        self.server = ControlServer("s", "pulsar://a", "t", dict.fromkeys(names, self.answer))

    def answer(self, request: Mapping[str, Any]) -> Any:
        self.requests.append(request)
        return self.told.pop(0) if len(self.told) > 1 else self.told[0]

    def __enter__(self) -> Asked:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.close()


class Terminal(io.StringIO):
    """Answers of a person."""

    def isatty(self) -> bool:
        return True


def plan(keys: int, dead_letters: int, matching: int) -> dict[str, Any]:
    first = [{"key": f"k{one}", "deadLetters": 2, "matching": 1} for one in range(min(keys, 100))]
    return {"keys": keys, "deadLetters": dead_letters, "matching": matching, "first": first}


LETTER = {
    "kind": "parked", "topic": "persistent://public/default/orders", "partition": 3,
    "messageId": "12:7:0", "key": "k[17]", "error": "ValueError", "attempts": 8, "bytes": 1_234,
    "reason": "ValueError: no\x1b[2Jsuch\ncolour", "ageSeconds": 7_300.0,
}  # fmt: skip


def page(count: int, examined: int, following: str | None) -> dict[str, Any]:
    return {"deadLetters": [LETTER] * count, "examined": examined, "next": following}


def test_dead_letters_are_listed_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    in_parts = LETTER | {"bytes": None, "key": None}
    with Asked({"deadLetters": [LETTER, in_parts], "examined": 40, "next": None}) as source:
        code, out, err = run(
            capsys, "dead-letters", "list", "--key", "k", "--topic", "orders", "--error", "E",
            "--older-than", "1h", "--newer-than", "2d", "--rejected",
        )  # fmt: skip
    assert (code, err) == (0, "")
    assert source.requests == [{
        "do": "dead_letters", "limit": 100, "key": "k", "error": "E", "older_than_s": 3_600.0,
        "topic": "persistent://public/default/orders", "newer_than_s": 172_800.0, "rejected": True,
    }]  # fmt: skip
    head, first, second, end = out.splitlines()
    for name in ("topic", "part.", "message id", "key", "error", "att.", "age", "size", "reason"):
        assert name in head
    assert first.split() == [
        "orders", "3", "12:7:0", "k[17]", "ValueError", "8", "2.0", "h", "1,234", "ValueError:",
        "no?[2Jsuch", "colour",
    ]  # fmt: skip
    assert "in parts" in second
    assert end == "2 rejected dead letters, 40 messages read."


def test_a_long_list_comes_page_by_page_up_to_its_limit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pages = (page(1_000, 5_000, "4:5"), page(0, 9_000, "4:900"), page(500, 600, "5:1"))
    with Asked(*pages) as source:
        code, out, _ = run(capsys, "dead-letters", "list", "--limit", "1500", "--json")
    told = json.loads(out)
    assert code == 0
    assert (len(told["deadLetters"]), told["examined"], told["more"]) == (1_500, 14_600, True)
    assert [(one["limit"], one.get("from")) for one in source.requests] == [
        (1_000, None), (500, "4:5"), (500, "4:900"),
    ]  # fmt: skip
    with Asked(page(100, 100, "1:2")):
        out = run(capsys, "dead-letters", "list")[1]
    assert out.endswith("100 dead letters, 100 messages read; --limit lists more.\n")


def test_an_empty_list_names_its_conditions(capsys: pytest.CaptureFixture[str]) -> None:
    with Asked(page(0, 0, None)):
        out = run(capsys, "dead-letters", "list")[1]
        assert out.startswith("0 dead letters, 0 messages read.\n")
        assert "--rejected lists the others" in out
        assert "--rejected" not in run(capsys, "dead-letters", "list", "--rejected")[1]


SHOWN = LETTER | {
    "publishTime": "2024-05-01T12:00:00+00:00", "eventTime": None,
    "writtenAt": "2024-05-01T12:01:00+00:00", "orderingKey": None, "schemaVersion": None,
    "properties": {"trace\x07": "1\n2"}, "value": b64encode(b'{"n": 1}\x00\xff').decode(),
    "bytes": 10,
}  # fmt: skip


def test_a_dead_letter_is_shown_in_each_format(capsys: pytest.CaptureFixture[str]) -> None:
    with Asked(SHOWN) as source:
        code, out, _ = run(
            capsys, "dead-letters", "show", "12:7", "--topic", "t", "--partition", "3"
        )
        assert code == 0
        assert source.requests == [
            {"do": "dead_letter", "id": "12:7:0", "topic": "t", "partition": 3}
        ]
        assert "error       ValueError\nreason      ValueError: no?[2Jsuch colour\n" in out
        assert "property    trace? = 1 2\n" in out
        assert out.endswith('value       10 bytes:\n{"n": 1}?\\xff\n')
        assert json.loads(run(capsys, "dead-letters", "show", "12:7:0", "--json")[1]) == SHOWN
        out = run(capsys, "dead-letters", "show", "12:7:0", "--format", "hex")[1]
        line = '00000000  7b 22 6e 22 3a 20 31 7d 00 ff                    {"n": 1}..\n'
        assert out.endswith(line)
        code, out, err = run(capsys, "dead-letters", "show", "12:7:0", "--format", "json")
        assert (code, out) == (2, "")
        assert "The value is not JSON" in err
    with Asked(SHOWN | {"value": b64encode(b'{"n": [1]}').decode()}):
        out = run(capsys, "dead-letters", "show", "12:7:0", "--format", "json")[1]
        assert out.endswith('{\n  "n": [\n    1\n  ]\n}\n')
    with Asked(SHOWN | {"value": None, "bytes": 0}):
        assert run(capsys, "dead-letters", "show", "12:7:0")[1].endswith("value       null\n")
    decoded = {"type": "AVRO", "version": 3, "text": '{\n  "n": 1\x7f\n}', "problem": None}
    with Asked(
        SHOWN | {"decoded": decoded},
        SHOWN | {"decoded": decoded | {"text": None, "problem": "It does not fit."}},
        SHOWN,
    ) as source:
        show = ("dead-letters", "show", "12:7:0", "--format", "schema")
        out = run(capsys, *show)[1]
        assert source.requests[0]["schema"] is True
        assert out.endswith(
            'value       10 bytes:\nschema      AVRO, version 3:\n{\n  "n": 1?\n}\n'
        )
        assert run(capsys, *show)[1].endswith("value       10 bytes:\n(It does not fit.)\n")
        code, _, err = run(capsys, *show)
        assert code == 1, "an older source does not decode"
        assert "Use the same release of keyshard" in err
    with Asked(SHOWN | {"bytes": 20_000_000}):
        out = run(capsys, "dead-letters", "show", "12:7:0")[1]
        assert "value       20,000,000 bytes, the first 10:\n" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["show", "12"], "message id is '12'"),
        (["show", "a:b:c"], "message id is 'a:b:c'"),
        (["show", "1:2:3", "--format", "xml"], "--format is 'xml'"),
        (["replay"], "Nothing selects dead letters"),
        (["discard"], "Nothing selects dead letters"),
        (["replay", "--all", "--key", "k"], "there are conditions: key.\n"),
        (["discard", "--all", "--older-than", "2h"], "there are conditions: older_than_s.\n"),
        (["list", "--dead-letter-topic", "t"], "Add --subscription"),
        (["list", "--topic", "a/b"], "is not a topic name"),
    ],
)
def test_wrong_input_is_refused_before_a_source_is_asked(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    code, out, err = run(capsys, "dead-letters", *arguments)
    assert (code, out) == (2, "")
    assert says in err


def test_every_command_names_a_missing_source(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (("list",), ("show", "1:2:3"), ("replay", "--all"), ("discard", "--all")):
        code, out, err = run(capsys, "dead-letters", *arguments)
        assert (code, out) == (1, "")
        assert err.startswith("[KEYSHARD_CONTROL] No running source")


@pytest.mark.parametrize(
    ("command", "question", "done"),
    [
        ("replay", "Replay 12 dead letters of 5 keys of 's'?", "Unparking 5 keys: 12 dead letters"),
        ("discard", "Discard 12 dead letters of 5 keys of 's'? This", "12 dead letters discarded."),
    ],
)
def test_a_replay_and_a_discard_need_a_confirmation(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    question: str,
    done: str,
) -> None:
    arguments = ("dead-letters", command, "--error", "ValueError", "--older-than", "2h")
    request = {
        "do": "unpark" if command == "replay" else "discard",
        "error": "ValueError", "older_than_s": 7_200.0,
    }  # fmt: skip
    with Asked(plan(5, 12, 7)) as source:
        monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
        code, out, err = run(capsys, *arguments)
        assert (code, out) == (2, ""), "there is no terminal to confirm"
        assert f"Nothing was {command.removesuffix('y')}" in err
        assert "Add --yes" in err
        monkeypatch.setattr("sys.stdin", Terminal("n\n"))
        code, out, err = run(capsys, *arguments)
        assert (code, out.strip()) == (1, "")
        assert question in err
        assert source.requests == [request | {"dry_run": True}] * 2
        monkeypatch.setattr("sys.stdin", Terminal("y\n"))
        code, out, _ = run(capsys, *arguments)
        assert code == 0
        assert out.strip().startswith(done)
        assert source.requests[2:] == [request | {"dry_run": True}, request]
        assert json.loads(run(capsys, *arguments, "--yes", "--json")[1]) == plan(5, 12, 7)
        assert source.requests[4:] == [request]
        assert run(capsys, "dead-letters", command, "--key", "k")[0] == 0, "a named key is enough"
        assert source.requests[5:] == [{"do": request["do"], "key": "k"}]
        assert run(capsys, "dead-letters", command, "--all", "--yes")[0] == 0
        assert source.requests[6:] == [{"do": request["do"], "all": True}]


@pytest.mark.parametrize(("command", "verb"), [("replay", "unpark"), ("discard", "discard")])
def test_a_dry_run_prints_the_plan_and_does_nothing(
    capsys: pytest.CaptureFixture[str], command: str, verb: str
) -> None:
    with Asked(plan(22, 44, 22)) as source:
        code, out, _ = run(capsys, "dead-letters", command, "--topic", "t", "--dry-run")
        assert code == 0
        lines = out.splitlines()
        assert lines[0].startswith(f"A {command} takes 44 dead letters of 22 keys")
        assert lines[0].endswith(". 22 dead letters match. Nothing was done.")
        assert lines[1] == "  'k0': 2 dead letters, 1 match"
        assert (len(lines), lines[-1]) == (22, "  and 2 more keys")
        output = run(capsys, "dead-letters", command, "--topic", "t", "--dry-run", "--json")[1]
        assert json.loads(output) == plan(22, 44, 22)
    topic = "persistent://public/default/t"
    assert source.requests == [{"do": verb, "topic": topic, "dry_run": True}] * 2


def test_nothing_to_do_needs_no_confirmation(capsys: pytest.CaptureFixture[str]) -> None:
    with Asked(plan(0, 0, 0)):
        for command, says in (
            ("discard", "0 dead letters discarded.\n"), ("replay", "No parked key matches.\n"),
        ):  # fmt: skip
            assert run(capsys, "dead-letters", command, "--all")[:2] == (0, says)


def test_an_answer_of_another_shape_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (("list",), ("show", "1:2:3"), ("replay", "--key", "k")):
        with Asked({"something": "else"}):
            code, out, err = run(capsys, "dead-letters", *arguments)
        assert (code, out) == (1, ""), arguments
        assert "cannot be understood" in err
