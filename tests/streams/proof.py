"""``python -m tests.proofs streams``: Spark streams with everything on at once, seed by seed.

Each case has two or three queries in one session, with formats, schemas, modes, columns and limits
drawn from its seed, and faults between any two steps. Judged: each message once by batch id, order
per key, values, batches that run again, the backlog, and that errors are sentences of keyshard.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path

from tests.proofs.runner import ENDLESS, Options, Outcome, Outcomes, Proof, failed
from tests.streams.cluster import Broker
from tests.streams.run import Case
from tests.support.machine import Since

SHOWN_MAX = 20
"""Most problems of a seed that are shown."""


def _outcomes(_: Options, seeds: range) -> Outcomes:
    directory = Path(tempfile.mkdtemp(prefix="keyshard-streams-"))
    print(f"files in {directory}", flush=True)
    broken = 0
    try:
        with Broker(directory / "broker") as broker:
            for seed in seeds:
                outcome = _run(broker, seed, directory / f"case-{seed}")
                broken += bool(outcome.error)
                yield outcome
    finally:
        if not broken:
            shutil.rmtree(directory)


def _run(broker: Broker, seed: int, folder: Path) -> Outcome:
    folder.mkdir()
    print(f"seed {seed}", flush=True)
    case, since = Case(broker, seed, folder, lambda text: print(text, flush=True)), Since()
    problems = case.problems
    try:
        case.run()
    except Exception as exc:  # noqa: BLE001 - the next case is another one
        outcome = failed(seed, exc, since)
        if outcome.trouble and not problems:
            return outcome
        problems.append(outcome.error or outcome.trouble)
    error = f"{len(problems)} problems" if problems else ""
    details = "\n".join(problem[:2500] for problem in problems[:SHOWN_MAX])
    return Outcome(seed, error, details, Counter({"errors of queries": len(case.errors)}))


PROOF = Proof(_outcomes, seeds=ENDLESS, minutes=5.0, keep_going=True)
