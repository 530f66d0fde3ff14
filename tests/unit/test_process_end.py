"""How the end of a process is explained."""

from __future__ import annotations

import pytest

from keyshard.core.process_end import LINE_CHARS_MAX, LINES_MAX, ending, last_lines, remedy
from keyshard.redaction import Secret
from spark_adapter.watched_process import explanation

CRASH = """\
loading
Fatal Python error: Segmentation fault

Thread 0x00007f1 (most recent call first):
  File "threading.py", line 331 in wait

Current thread 0x00007f2 (most recent call first):
  File "decode.py", line 7 in decode
  File "main.py", line 3 in <module>
"""


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (-9, "was killed by SIGKILL (9)"),
        (-11, "was killed by SIGSEGV (11)"),
        (-63, "was killed by signal 63"),
        (3, "ended with exit status 3"),
        (0, "ended with exit status 0"),
        (None, "ended, with an unknown exit status"),
    ],
)
def test_an_end_names_the_signal_or_the_status(status: int | None, text: str) -> None:
    assert ending(status) == text


@pytest.mark.parametrize(
    ("status", "word"),
    [(-9, "memory limit"), (-11, "Native code crashed"), (-15, "person"), (3, "error"),
     (None, "person")],
)  # fmt: skip
def test_the_remedy_fits_the_end(status: int | None, word: str) -> None:
    assert word in remedy(status)


def test_the_end_of_a_log_is_bounded() -> None:
    lines = [f"line {number} " + "x" * 1_000 for number in range(100)]
    shown = last_lines("\n".join(lines) + "\n\n").split("\n")
    assert [line[:7] for line in shown] == [f"line {n}" for n in range(100 - LINES_MAX, 100)]
    assert {len(line) for line in shown} == {LINE_CHARS_MAX}
    assert last_lines("") == ""


def test_the_cause_and_the_stack_of_a_crash_remain() -> None:
    assert last_lines(CRASH).split("\n") == [
        "Fatal Python error: Segmentation fault",
        "Current thread 0x00007f2 (most recent call first):",
        '  File "decode.py", line 7 in decode',
        '  File "main.py", line 3 in <module>',
    ]


def test_the_error_of_a_query_has_cause_place_and_remedy_without_secrets() -> None:
    password = Secret("correct-horse-battery")
    log = "asked http://ann:pass@host/?token=abc\nsent correct-horse-battery\n"
    error = explanation(12, -9, log)
    assert str(error).startswith("[KEYSHARD_STREAM_PROCESS] Stream process 12 on the driver")
    assert "was killed by SIGKILL (9)" in error.message
    assert "memory limit" in error.message
    assert "Option windowMaxBytes limits it" in error.message
    assert "standard error of the driver. Its last lines:\nasked http://***@host" in error.message
    assert "sent ***" in error.message
    assert "pass@" not in error.message
    assert password.reveal() not in error.message
    assert "Its last lines" not in explanation(12, 3, "").message


def test_a_secret_that_a_shown_line_cuts_in_two_is_not_shown() -> None:
    password = Secret("correct-horse-battery")
    error = explanation(12, 1, "x" * (LINE_CHARS_MAX - 10) + f" {password.reveal()}\n")
    assert "xx ***" in error.message
    assert "correct" not in error.message
