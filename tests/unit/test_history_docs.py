"""``docs/history.md`` agrees with the code, and its example runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from keyshard.testing.verify.checkers import check
from keyshard.testing.verify.history import KINDS, Event, read_history

TEXT = (Path(__file__).parents[2] / "docs" / "history.md").read_text()


def table(section: str) -> list[list[str]]:
    """Cells of the table in a section, without its head."""
    body = TEXT.split(f"## {section}\n")[1].split("\n## ")[0]
    rows = [line for line in body.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_every_field_is_documented() -> None:
    named = [name for row in table("An event") for name in re.findall(r"`(\w+)`", row[0])]
    assert named == list(Event.__struct_fields__)


def test_every_kind_is_documented_with_its_meaning() -> None:
    plain = {row[0].strip("`"): row[1].replace("`", "") for row in table("Kinds")}
    assert plain == KINDS


def test_every_promise_is_documented() -> None:
    names = {verdict.name for verdict in check([Event(0, "sent", topic="t", seq=0)])}
    assert {row[0] for row in table("What is checked")} == names


def test_the_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = TEXT.split("```python\n")[1].split("```")[0]
    exec(compile(code, "docs/history.md", "exec"), {})  # noqa: S102 - it is ours
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 11
    assert all(line.startswith("ok ") for line in printed)
    assert "ok  re-runs are equal - 1 runs of batches compared." in printed
    by_hand = TEXT.split("```json\n")[1].split("```")[0].splitlines()
    written = list(read_history("history.jsonl"))
    assert [Event.from_json(line) for line in by_hand] == [written[0], written[2]]
