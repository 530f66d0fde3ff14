"""Named tests fail if one change of the code breaks a promise."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from compileall import compile_dir
from dataclasses import dataclass
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import Any

import pytest

from tests.mutants.batch_mutants import OF_BATCHES
from tests.mutants.bookie_mutants import OF_BOOKIES
from tests.mutants.checker_mutants import OF_CHECKERS
from tests.mutants.handler_mutants import OF_HANDLERS
from tests.mutants.index_mutants import OF_INDEX
from tests.mutants.lane_mutants import OF_LANES
from tests.mutants.mutant import COPIED, Mutant, changed, copy_code
from tests.mutants.output_mutants import OF_OUTPUTS
from tests.mutants.scalable_mutants import OF_SCALABLE_TOPICS
from tests.mutants.sink_mutants import OF_SINK
from tests.mutants.wire_mutants import OF_WIRE
from tests.mutants.worker_mutants import OF_WORKERS
from tests.support.deadlines import deadline

ALL = (
    *OF_BATCHES,
    *OF_BOOKIES,
    *OF_INDEX,
    *OF_HANDLERS,
    *OF_LANES,
    *OF_CHECKERS,
    *OF_WORKERS,
    *OF_WIRE,
    *OF_SINK,
    *OF_OUTPUTS,
    *OF_SCALABLE_TOPICS,
)
TIMEOUT_S = int(deadline(240))
"""Longest time that the tests of one mutant, or all on the code as it is, may take, seconds."""
DEADLINE_S, MUTANT_DEADLINE_S = 60.0, 15.0
"""Deadline of waits in tests, seconds; what a mutant never does is waited for to the deadline."""


@dataclass(frozen=True)
class Outcome:
    """How tests ended on a copy of the code."""

    exit_code: int
    output: str
    failed: list[str]
    """Tests that failed themselves, not in a fixture."""
    modules: dict[str, str]
    """Modules of keyshard that were imported, and from where."""


@dataclass(frozen=True)
class Copy:
    """A copy of the code and its tests; mutants change it one after the other."""

    root: Path
    warm: subprocess.Popen[str]
    """Runs tests on it."""

    def run(self, tests: tuple[str, ...], deadline_s: float) -> Outcome:
        record, output = self.root / "record.json", self.root / "output.txt"
        for file in (record, output):
            file.unlink(missing_ok=True)
        plugins = ["-p", "no:cacheprovider", "-p", "kill_record"]
        asked = {
            "arguments": ["-q", *plugins, f"--timeout={TIMEOUT_S // 2}", *tests],
            "output": str(output),
            "seconds": TIMEOUT_S,
            "deadline_s": deadline_s,
        }
        assert self.warm.stdin is not None
        assert self.warm.stdout is not None
        print(json.dumps(asked), file=self.warm.stdin, flush=True)
        exit_code = self.warm.stdout.readline()
        result = output.read_text(errors="replace") if output.exists() else ""
        assert record.exists(), f"the tests did not run to their end:\n{result}"
        found: dict[str, Any] = json.loads(record.read_text())
        return Outcome(int(exit_code), result, found["failed"], found["modules"])

    def imported(self, outcome: Outcome, file: str) -> bool:
        """Whether a file of this copy was what the tests ran on."""
        name = file.removesuffix(".py").replace("/", ".")
        return outcome.modules.get(name) == str(self.root / file)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copy]:
    root = tmp_path_factory.mktemp("mutants").resolve()
    copy_code(root)
    for name in COPIED:
        if name != "tests":
            # Checked by the hash of the source: the same file changes several times a second.
            compile_dir(root / name, quiet=1, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
    environment = {name: v for name, v in os.environ.items() if name != "PYTEST_ADDOPTS"} | {
        "PYTHONPATH": os.pathsep.join([str(root), str(root / "tests/mutants")]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "KEYSHARD_KILL_RECORD": str(root / "record.json"),
    }
    with subprocess.Popen(
        [sys.executable, str(root / "tests/mutants/warm.py")], cwd=root, env=environment,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as warm:  # fmt: skip
        yield Copy(root, warm)
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def unchanged(copy: Copy) -> Outcome:
    """All killers on the code as it is."""
    return copy.run(
        tuple(dict.fromkeys(test for mutant in ALL for test in mutant.killers)), DEADLINE_S
    )


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_the_suite_notices_each_mutant(
    mutant: Mutant, copy: Copy, unchanged: Outcome, record_property: Any
) -> None:
    assert unchanged.exit_code == 0, unchanged.output
    originals = {edit.file: (copy.root / edit.file).read_text() for edit in mutant.edits}
    texts = dict(originals)
    for edit in mutant.edits:
        assert copy.imported(unchanged, edit.file), f"no killer runs {edit.file}"
        texts[edit.file] = changed(texts[edit.file], edit)
    try:
        for file, text in texts.items():
            (copy.root / file).write_text(text)
        outcome = copy.run(mutant.killers, MUTANT_DEADLINE_S)
    finally:
        for file, text in originals.items():
            (copy.root / file).write_text(text)
    assert all(copy.imported(outcome, file) for file in texts), outcome.modules
    assert outcome.exit_code == pytest.ExitCode.TESTS_FAILED, (
        f"keyshard may {mutant.name} and nobody notices. {mutant.promise}\n{outcome.output}"
    )
    for killer in mutant.killers:
        killed_by = [test for test in outcome.failed if test.startswith(killer)]
        assert killed_by, f"{killer} does not notice.\n{outcome.output}"
        record_property("killed_by", killed_by[0])
        print(f"{mutant.name}: killed by {killed_by[0]}")
