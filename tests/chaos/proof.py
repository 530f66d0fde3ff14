"""``python -m tests.proofs chaos``: chaos on a broker of its own, and the verdict on it."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections import Counter
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from keyshard.config.connection import AUTO, CLIENT, WIRE
from tests.chaos.pipeline import MESSAGES_PER_MINUTE, PipelineChaos, PipelineReport
from tests.chaos.plan import WORKERS, Subject
from tests.chaos.report import Report, text_of
from tests.chaos.runner import Chaos
from tests.proofs.runner import Options, Outcomes, Proof, outcome_of

PIPELINE = "pipeline"
"""The query from topic to topic. A seed chooses only among the other subjects."""
MESSAGES_MIN = 5_000
say = partial(print, flush=True)


def _outcomes(given: Options, seeds: range) -> Outcomes:
    if given.json is not None:
        given.json.write_text("")
    for seed in seeds:
        options = drawn(seed, given.subject, given.workers)
        one = Options(**{**vars(given), **options})
        yield replace(outcome_of(seed, partial(_run, one)), options=options)


def drawn(seed: int, subject: str | None, workers: str | None) -> dict[str, str]:
    """Return the options that a seed decides, unless they are given."""
    if subject == PIPELINE:
        return {"subject": subject}
    return {
        "subject": subject or random.Random(seed).choice([*Subject]).value,
        "workers": workers or random.Random(f"{seed}: workers?").choice(WORKERS),
    }


def _run(given: Options, seed: int) -> Counter[str]:
    directory = Path(tempfile.mkdtemp(prefix="keyshard-chaos-"))
    say(f"seed {seed}, {given.subject}, files in {directory}; history.jsonl and logs lie there")
    report: Report | PipelineReport
    if given.subject == PIPELINE:
        messages = max(MESSAGES_MIN, int(given.fault_minutes * MESSAGES_PER_MINUTE))
        report = PipelineChaos(directory, seed, messages, say).run(60 * given.fault_minutes)
    else:
        report = Chaos(
            directory, Subject(given.subject), seed, say,
            workers=given.workers, transport=given.transport, brokers=given.brokers,
        ).run(given.fault_minutes)  # fmt: skip
    figures = report.to_dict() if isinstance(report, Report) else asdict(report)
    if given.json is not None:
        with given.json.open("a") as file:
            file.write(json.dumps(figures) + "\n")
    if not report.holds:
        raise AssertionError(f"{report}\n{text(report)}")
    say(text(report))
    shutil.rmtree(directory)
    counts = Counter(report.faults)
    for name, value in figures.items():
        if type(value) is int and name not in ("seed", "brokers"):
            counts[name.replace("_", " ")] = value
    return counts


def text(report: Report | PipelineReport) -> str:
    """Return the verdicts of a report and its problems, line by line."""
    problems = report.problems if isinstance(report, Report) else ()
    return text_of(report.verdicts, problems)


PROOF = Proof(
    _outcomes,
    options={
        "--fault-minutes": {"type": float, "default": 1.0, "help": "of faults in one seed (1)"},
        "--subject": {
            "choices": [*(one.value for one in Subject), PIPELINE],
            "help": "the program (default: decided by the seed)",
        },
        "--workers": {"choices": WORKERS, "help": "of the program (default: decided by the seed)"},
        "--transport": {"choices": (AUTO, CLIENT, WIRE), "default": AUTO, "help": "of the program"},
        "--brokers": {"type": int, "default": 1, "help": "with several, two bookies (1)"},
        "--json": {"type": Path, "help": "file for the figures: one line for each seed"},
    },
)  # fmt: skip
