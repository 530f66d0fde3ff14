"""``python -m tests.chaos``: chaos on a broker of its own, and the verdict on it."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from keyshard.config.connection import AUTO, CLIENT, WIRE
from tests.chaos.pipeline import MESSAGES_PER_MINUTE, PipelineChaos
from tests.chaos.plan import WORKERS, Subject
from tests.chaos.report import Report
from tests.chaos.runner import Chaos

PIPELINE = "pipeline"
"""The query from topic to topic. A seed chooses only among the other subjects."""
MESSAGES_MIN = 5_000


def main() -> int:
    """Return 0 if every promise holds; 1 if one is broken, or if something did not come in time."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long faults are injected")
    parser.add_argument("--seed", type=int, help="decides the faults; default: another each time")
    parser.add_argument(
        "--subject",
        choices=[*(one.value for one in Subject), PIPELINE],
        help="the program that they befall; default: decided by the seed",
    )
    parser.add_argument(
        "--workers",
        choices=WORKERS,
        help="what has the consumers of the program; default: decided by the seed",
    )
    parser.add_argument(
        "--transport", choices=(AUTO, CLIENT, WIRE), default=AUTO, help="what consumes and reads"
    )
    parser.add_argument(
        "--brokers", type=int, default=1, help="number of brokers; with several, two bookies"
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    if given.subject == PIPELINE:
        return _pipeline(seed, given.minutes, given.json)
    subject = Subject(given.subject or random.Random(seed).choice([*Subject]).value)
    workers: str = given.workers or random.Random(f"{seed}: workers?").choice(WORKERS)
    directory = Path(tempfile.mkdtemp(prefix="keyshard-chaos-"))
    transport: str = given.transport
    how = f"{subject.value}, {workers}, {transport}, {given.brokers} broker(s)"
    print(f"seed {seed}, {how}, files in {directory}", flush=True)
    chaos = Chaos(
        directory,
        subject,
        seed,
        lambda text: print(text, flush=True),
        workers=workers,
        transport=transport,
        brokers=given.brokers,
    )
    report = chaos.run(given.minutes)
    _print(report)
    if given.json is not None:
        given.json.write_text(json.dumps(report.to_dict(), indent=2) + "\n")
    if report.holds:
        shutil.rmtree(directory)
        return 0
    print(f"The history is {directory / 'history.jsonl'}; logs lie beside it.")
    again = f"--minutes {given.minutes:g} --seed {seed} --subject {subject.value}"
    again += f" --workers {workers} --transport {transport} --brokers {given.brokers}"
    print(f"The same faults again: python -m tests.chaos {again}")
    return 1


def _pipeline(seed: int, minutes: float, figures: Path | None) -> int:
    directory = Path(tempfile.mkdtemp(prefix="keyshard-chaos-"))
    print(f"seed {seed}, {PIPELINE}, files in {directory}", flush=True)
    messages = max(MESSAGES_MIN, int(minutes * MESSAGES_PER_MINUTE))
    chaos = PipelineChaos(directory, seed, messages, lambda text: print(text, flush=True))
    report = chaos.run(60 * minutes)
    for verdict in report.verdicts:
        print("ok " if verdict.holds else "BAD", verdict.name, "-", verdict.message)
    print(report)
    if figures is not None:
        figures.write_text(json.dumps(asdict(report), indent=2) + "\n")
    if report.holds:
        shutil.rmtree(directory)
        return 0
    print(
        f"The same faults again: python -m tests.chaos --minutes {minutes:g} --seed {seed}"
        f" --subject {PIPELINE}"
    )
    return 1


def _print(report: Report) -> None:
    for verdict in report.verdicts:
        print("ok " if verdict.holds else "BAD", verdict.name, "-", verdict.message)
        for event in verdict.offending:
            print("     ", event.to_json())
    for problem in report.problems:
        print("BAD", problem)
    for name, times in report.faults.items():
        print(f"{times:9,} {name}")
    for name, value in report.to_dict().items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            print(f"{value:9,} {name.replace('_', ' ')}")


if __name__ == "__main__":
    sys.exit(main())
