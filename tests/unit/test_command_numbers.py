"""Numbers on the command line: invalid or absurd ones are refused by one sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from keyshard.cli import main

HUGE = str(10**40)
LONG = "9" * 5_000
"""More digits than Python reads at once."""
WHOLE = ["x", "", "1.5", "nan"]
"""No whole numbers."""
COUNTS = [*WHOLE, "0", "-1", HUGE, LONG]
AGES = [*WHOLE, "-1s", "1.5h", HUGE + "d", LONG + "s", "\u0663s"]
REALS = ["x", "", "nan", "inf", "-inf", "-1", "1e400"]
LIVE = ["check", "--live", "--topic", "t"]
PLAN = ["rescale", "8", "--dry-run", "--from", "4"]
DOCTOR = ["doctor", "--topic", "t", "--subscription", "s"]

TABLE: list[tuple[list[str], str, list[str]]] = [
    (["produce", "t"], "--messages", COUNTS),
    (["produce", "t"], "--keys", COUNTS),
    (["produce", "t"], "--partitions", COUNTS),
    (["produce", "t"], "--size", COUNTS),
    (["produce", "t"], "--entry-messages", COUNTS),
    (["produce", "t"], "--seed", [*WHOLE, LONG]),
    (["produce", "t"], "--zipf", [*REALS, "0"]),
    (["produce", "t"], "--rate", [*REALS, "0"]),
    (LIVE, "--messages", COUNTS),
    (LIVE, "--keys", COUNTS),
    (LIVE, "--partitions", COUNTS),
    (LIVE, "--parallelism", COUNTS),
    (LIVE, "--timeout-s", [*REALS, "0"]),
    (["check", "history"], "--liveness-s", REALS),
    (["check", "history"], "--deliveries-max", COUNTS),
    (["explain", "k"], "--parallelism", COUNTS),
    (["explain", "k"], "--pid", COUNTS),
    (["stacks"], "--limit", COUNTS),
    (DOCTOR, "--parallelism", COUNTS),
    (DOCTOR, "--rate", [*REALS, "0"]),
    ([*DOCTOR, "--rate", "1"], "--message-bytes", COUNTS),
    (["rescale", "4", "--dry-run"], "--from", COUNTS),
    (PLAN, "--handler-ms", REALS),
    (PLAN, "--lanes", COUNTS),
    (PLAN, "--workers", COUNTS),
    (["rescale"], "ranges", COUNTS),
    (["dead-letters", "list"], "--older-than", AGES),
    (["dead-letters", "list"], "--newer-than", AGES),
    (["dead-letters", "list"], "--limit", COUNTS),
    (["dead-letters", "show", "1:2:3"], "--partition", [*WHOLE, "-2", HUGE, LONG]),
    (["dead-letters", "replay"], "--older-than", AGES),
    (["dead-letters", "discard"], "--newer-than", AGES),
    (["broker", "start"], "--port", COUNTS),
    (["broker", "start"], "--admin-port", COUNTS),
    (["broker", "logs"], "--lines", [*WHOLE, "-1", HUGE, LONG]),
]
OWN_NAMES = {"--size": "size_bytes", "--rate": "rate_per_s", "--port": "A port"}
"""The name of an option in an error, if it differs from its own."""


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        pytest.param(command, option, value, id=f"{command[0]}-{option}-{value[:9]}")
        for command, option, values in TABLE
        for value in values
    ],
)
def test_an_impossible_number_is_refused_by_a_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: list[str], option: str, value: str
) -> None:
    given = [value] if not option.startswith("-") else [f"{option}={value}"]
    data = ["--data", str(tmp_path / "data")] if command[0] == "broker" else []
    if command[0] == "check" and "history" in command:
        (tmp_path / "history").write_text("")
        command = ["check", str(tmp_path / "history")]
    with pytest.raises(SystemExit) as caught:
        main([*command, *data, *(["--", *given] if given == [value] else given)])
    output = capsys.readouterr()
    assert (caught.value.code, output.out) == (2, "")
    said = " ".join(re.sub(r"[│╭╮╰╯─]", " ", output.err).split())
    name = option.lstrip("-")
    names = {name, name.replace("-", "_"), OWN_NAMES.get(option, option), "A port"}
    if option in {"--from", "--ranges"} or option == "ranges":
        names.add("parallelism")
    assert any(one in said for one in names), said
    assert len(said) < 400, "a value of any length is shown"
    assert "Traceback" not in said
