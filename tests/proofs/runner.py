"""The loop over the seeds of a proof, its report, and the command that repeats a seed."""

from __future__ import annotations

import argparse
import random
import shlex
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from tests.support.machine import Since, trouble

REPORT_S = 5.0
"""Time between two lines of progress, seconds."""
ENDLESS = 10**9
"""Number of seeds of a proof that ends by its time, or by itself."""
INCONCLUSIVE = 75
"""Exit status if no promise broke and the machine had trouble with a seed."""
COUNTS_MAX = 8
"""Most counts in the last line; more of them become a table above it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a seed."""

    seed: int
    error: str = ""
    """The broken promise; empty if all promises hold."""
    details: str = ""
    """More about the error."""
    counts: Counter[str] = field(default_factory=Counter)
    options: Mapping[str, Any] = field(default_factory=dict)
    """Values of options that repeat the seed, beside the given ones."""
    trouble: str = ""
    """Trouble of the machine, because of which the seed says nothing; empty if there was none."""


Options = argparse.Namespace
Outcomes = Generator[Outcome, None, None]


@dataclass(frozen=True, slots=True)
class Proof:
    """A family of tests by seed."""

    outcomes: Callable[[Options, range], Outcomes]
    """Takes the given options and the seeds. It keeps open what the seeds share, until it is
    closed."""
    seeds: int = 1
    """Number of seeds by default."""
    seed_start: int | None = None
    """The first seed by default; ``None``: drawn."""
    minutes: float | None = None
    """Default of the time after which no seed begins; ``None``: no limit."""
    keep_going: bool = False
    """Whether the next seed follows a broken one by default."""
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Its own options: arguments of ``add_argument`` by flag."""


def outcome_of(seed: int, run: Callable[[int], Counter[str]]) -> Outcome:
    """Run a seed; return the counts that it returns, or the error that it raises."""
    since = Since()
    try:
        return Outcome(seed, counts=run(seed))
    except Exception as exc:  # noqa: BLE001 - each error fails its seed
        return failed(seed, exc, since)


def failed(seed: int, error: BaseException, since: Since) -> Outcome:
    """Return the outcome of a seed that ended with an error: trouble, or a broken promise.

    Args:
        seed: The seed.
        error: The error.
        since: Taken when the seed began.
    """
    why = trouble(error, since)
    if why:
        return Outcome(seed, trouble=f"{error}: {why}")
    return Outcome(seed, "".join(traceback.format_exception(error)))


def run(name: str, proof: Proof, words: Sequence[str]) -> int:
    """Run seeds, and report.

    Args:
        name: Name of the proof.
        proof: The proof.
        words: The options, as given.

    Returns:
        1 if a promise broke, otherwise :data:`INCONCLUSIVE` if the machine had trouble, or 0.
    """
    parser, own = parser_of(name, proof)
    given = parser.parse_args(words)
    if given.seed_start is None:
        given.seed_start = random.SystemRandom().randrange(10**6)
        print(f"The first seed is {given.seed_start}.", flush=True)
    if given.minutes is None and given.seeds is None:
        given.minutes = proof.minutes
    count = proof.seeds if given.seeds is None else given.seeds
    seeds = range(given.seed_start, given.seed_start + count)
    began_s = reported_s = time.monotonic()
    counts: Counter[str] = Counter()
    done = broken = troubled = 0
    with closing(proof.outcomes(given, seeds)) as outcomes:
        for outcome in outcomes:
            done += 1
            counts.update(outcome.counts)
            again = command(name, own, {**vars(given), **outcome.options}, outcome.seed)
            if outcome.trouble:
                troubled += 1
                print(f"seed {outcome.seed} is inconclusive: {outcome.trouble}\n    {again}")
            if outcome.error:
                broken += 1
                print(failure(outcome, again), flush=True)
                if not given.keep_going:
                    break
            now_s = time.monotonic()
            if now_s - reported_s >= REPORT_S:
                reported_s = now_s
                print(progress(outcome.seed, done, broken + troubled), file=sys.stderr, flush=True)
            if given.minutes is not None and now_s >= began_s + 60 * given.minutes:
                break
    if troubled:
        counts["inconclusive"] = troubled
    print(summary(done, broken + troubled, counts, time.monotonic() - began_s))
    return 1 if broken else INCONCLUSIVE if troubled else 0


def parser_of(name: str, proof: Proof) -> tuple[argparse.ArgumentParser, list[argparse.Action]]:
    """Return the parser of a proof, and the options that no other proof has."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.proofs {name}")
    seeds = "no limit" if proof.seeds == ENDLESS else proof.seeds
    first = "drawn" if proof.seed_start is None else proof.seed_start
    minutes = "" if proof.minutes is None else f" (default without --seeds: {proof.minutes:g})"
    add = parser.add_argument
    add("--seeds", type=int, help=f"how many (default: {seeds})")
    add(
        "--seed-start", type=int, default=proof.seed_start, help=f"the first one (default: {first})"
    )
    add("--minutes", type=float, help=f"no seed begins after that{minutes}")
    add(
        "--keep-going", action=argparse.BooleanOptionalAction, default=proof.keep_going,
        help="whether the next seed follows a broken one",
    )  # fmt: skip
    return parser, [add(flag, **how) for flag, how in proof.options.items()]


def command(name: str, own: Sequence[argparse.Action], values: Mapping[str, Any], seed: int) -> str:
    """Return the command that repeats a seed.

    Args:
        name: Name of the proof.
        own: Its own options.
        values: Their values.
        seed: The seed.
    """
    words: list[str] = []
    for one in own:
        value = values[one.dest]
        if value != one.default and one.dest != "json":
            words += [one.option_strings[0], *([] if one.nargs == 0 else [str(value)])]
    return repeats(name, seed, *words)


def repeats(name: str, seed: int, *options: str) -> str:
    """Return the command that repeats a seed of a proof with these options."""
    return shlex.join([
        *("python", "-m", "tests.proofs", name),
        *("--seeds", "1", "--seed-start", str(seed), *options),
    ])  # fmt: skip


def failure(outcome: Outcome, again: str) -> str:
    """Return the text about a broken seed; ``again`` is the command that repeats it."""
    details = f"{outcome.details.rstrip()}\n" if outcome.details else ""
    return (
        f"seed {outcome.seed} breaks a promise: {outcome.error.rstrip()}\n{details}"
        f"To run it again:\n    {again}\n"
    )


def progress(seed: int, done: int, failed: int) -> str:
    """Return the line about a run that goes on."""
    return f"at seed {seed}: {done - failed:,} of {done:,} seeds hold"


def summary(done: int, failed: int, counts: Counter[str], took_s: float) -> str:
    """Return the end of a report: the last line, and many counts as a table above it."""
    held, took = f"{done - failed:,} of {done:,} seeds hold", f"in {took_s:.0f} s"
    if len(counts) > COUNTS_MAX:
        table = [f"{value:9,} {name}" for name, value in sorted(counts.items())]
        return "\n".join([*table, f"{held}, {took}"])
    return ", ".join([held, *(f"{value:,} {name}" for name, value in counts.items()), took])
