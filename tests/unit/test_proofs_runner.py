"""The one runner of the searches by seed: its loop, its report, its command to repeat a seed."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.proofs.__main__ import PROOFS, proof
from tests.proofs.runner import (
    INCONCLUSIVE,
    Options,
    Outcome,
    Outcomes,
    Proof,
    outcome_of,
    parser_of,
    run,
)
from tests.support import machine
from tests.support.deadlines import DeadlineError
from tests.support.machine import MachineError
from tests.support.proof_run import hold

BROKEN = {4, 6}


def of_broken(_: Options, seeds: range) -> Outcomes:
    for seed in seeds:
        yield Outcome(seed, "rows lost" if seed in BROKEN else "", counts=Counter(rows=seed))


def seeded(**changes: Any) -> Proof:
    options = {"--world": {}, "--verbose": {"action": "store_true"}, "--json": {}}
    fields: dict[str, Any] = {"seeds": 3, "seed_start": 3, "options": options}
    return Proof(of_broken, **fields | changes)


def test_seeds_that_hold_end_with_status_0_and_a_line_that_sums_their_counts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("wire", seeded(), ["--seed-start", "7"]) == 0
    assert capsys.readouterr().out.startswith("3 of 3 seeds hold, 24 rows, in ")


def test_a_broken_seed_ends_the_run_with_status_1_and_the_command_that_repeats_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("wire", seeded(), []) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines == [
        "seed 4 breaks a promise: rows lost",
        "To run it again:",
        "    python -m tests.proofs wire --seeds 1 --seed-start 4",
        "",
    ]
    assert last.startswith("1 of 2 seeds hold, 7 rows, in ")


@pytest.mark.parametrize(
    ("default", "options", "done"),
    [(False, ["--keep-going"], 5), (True, [], 5), (True, ["--no-keep-going"], 2)],
)
def test_a_run_that_keeps_going_reports_each_broken_seed(
    capsys: pytest.CaptureFixture[str], *, default: bool, options: list[str], done: int
) -> None:
    assert run("wire", seeded(keep_going=default), ["--seeds", "5", *options]) == 1
    broken = BROKEN & set(range(3, 3 + done))
    out = capsys.readouterr().out
    assert f"{done - len(broken)} of {done} seeds hold" in out
    assert all(f"--seeds 1 --seed-start {seed}\n" in out for seed in broken)


def test_a_seed_with_trouble_of_the_machine_neither_holds_nor_breaks_a_promise(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def outcomes(_: Options, seeds: range) -> Outcomes:
        yield Outcome(seeds.start, trouble="no memory")
        yield Outcome(seeds.start + 1)

    assert run("wire", Proof(outcomes, seed_start=3), []) == INCONCLUSIVE
    first, again, last = capsys.readouterr().out.splitlines()
    assert first == "seed 3 is inconclusive: no memory"
    assert again == "    python -m tests.proofs wire --seeds 1 --seed-start 3"
    assert last.startswith("1 of 2 seeds hold, 1 inconclusive, in ")


def test_options_that_were_given_and_those_of_the_seed_are_in_the_command_that_repeats_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def outcomes(_: Options, seeds: range) -> Outcomes:
        yield Outcome(seeds.start, "rows lost", options={"verbose": True})

    words = ["--world", "a b", "--seed-start", "9", "--json", "figures", "--minutes", "1"]
    run("wire", Proof(outcomes, options=seeded().options), words)
    command = "python -m tests.proofs wire --seeds 1 --seed-start 9 --world 'a b' --verbose\n"
    assert command in capsys.readouterr().out


def test_no_seed_begins_after_the_given_minutes(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--minutes", "0"], ["--minutes", "0", "--seeds", "9"]):
        run("wire", seeded(seed_start=10), words)
        assert "1 of 1 seeds hold" in capsys.readouterr().out


def test_the_default_of_minutes_limits_no_given_number_of_seeds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words, done in (([], 1), (["--seeds", "9"], 9)):
        run("wire", seeded(seed_start=10, minutes=0.0), words)
        assert f"{done} of {done} seeds hold" in capsys.readouterr().out


def test_a_first_seed_that_is_drawn_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    seen = []

    def outcomes(_: Options, seeds: range) -> Outcomes:
        seen.append(seeds.start)
        yield Outcome(seeds.start)

    run("wire", Proof(outcomes), [])
    assert capsys.readouterr().out.startswith(f"The first seed is {seen[0]}.\n")


def test_what_a_proof_keeps_open_is_closed_when_a_broken_seed_ends_the_run() -> None:
    closed = []

    def outcomes(_: Options, seeds: range) -> Outcomes:
        try:
            yield from (Outcome(seed, "rows lost") for seed in seeds)
        finally:
            closed.append(True)

    assert run("wire", Proof(outcomes, seeds=9), []) == 1
    assert closed == [True]


def test_an_error_that_a_seed_raises_breaks_it() -> None:
    def raises(seed: int) -> Counter[str]:
        raise AssertionError(f"rows of {seed} lost")

    assert outcome_of(3, raises).error.endswith("AssertionError: rows of 3 lost\n")


def test_only_a_deadline_that_passed_on_a_slower_machine_is_trouble(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def outcome(error: Exception) -> Outcome:
        def raises(_: int) -> Counter[str]:
            raise error

        return outcome_of(3, raises)

    monkeypatch.setattr(machine, "measured_now", lambda: 100.0)
    late = outcome(DeadlineError("10 messages"))
    assert late.trouble.startswith("10 messages: the machine is ")
    assert not late.error
    assert "10 messages" in outcome(AssertionError("10 messages")).error
    monkeypatch.setattr(machine, "measured_now", lambda: 0.0)
    assert "10 messages" in outcome(DeadlineError("10 messages")).error


@pytest.mark.parametrize("status", [1, INCONCLUSIVE])
def test_a_test_that_runs_a_proof_fails_by_its_output_and_tells_trouble_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@"\nexit {status}\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    kind = MachineError if status == INCONCLUSIVE else AssertionError
    with pytest.raises(kind, match=r"-m tests\.proofs wire --seeds 1"):
        hold("wire", "--seeds", "1", limit_s=10)


@pytest.mark.parametrize("name", PROOFS)
def test_each_proof_has_a_parser_with_the_common_options(name: str) -> None:
    text = parser_of(name, proof(name))[0].format_help()
    assert all(one in text for one in ("--seeds", "--seed-start", "--minutes", "--keep-going"))
