"""Runs seeds in several processes; a seed that hangs is ended with the stacks of its threads."""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from random import Random

from tests.fuzz import (
    avro_values,
    checkpoints,
    exceptions,
    json_values,
    messages,
    options,
    protobuf_values,
)
from tests.proofs.runner import Options, Outcome, Outcomes, Proof, failed
from tests.support.deadlines import deadline
from tests.support.machine import Since

TARGETS: tuple[Callable[[Random, str], None], ...] = (
    options.source_options,
    options.run_options,
    options.calls,
    options.batch_options,
    checkpoints.checkpoints,
    messages.messages,
    exceptions.exceptions,
    avro_values.avro_values,
    protobuf_values.protobuf_values,
    json_values.json_values,
)
"""A seed attacks one of them, in turns."""
HANG_S = deadline(120)
"""Time after which the process of a seed is ended, seconds."""


def run_seed(seed: int) -> Outcome:
    """Run a seed; return its outcome."""
    target, since = TARGETS[seed % len(TARGETS)], Since()
    logging.disable(logging.CRITICAL)
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    try:
        target(Random(f"fuzz:{seed}"), f"fuzz-{seed}")
    except Exception as exc:  # noqa: BLE001 - whatever it is, it fails the seed
        return replace(failed(seed, exc, since), details=f"by {target.__name__}")
    finally:
        faulthandler.cancel_dump_traceback_later()
        logging.disable(logging.NOTSET)
    return Outcome(seed)


def run_seeds(first: int, count: int, processes: int) -> Iterator[Outcome]:
    """Run seeds in their order."""
    context = multiprocessing.get_context("spawn")
    # A hostile checkpoint may be a relative path.
    with (
        tempfile.TemporaryDirectory(prefix="keyshard-fuzz-") as folder,
        ProcessPoolExecutor(processes, context, os.chdir, (folder,)) as pool,
    ):
        yield from pool.map(run_seed, range(first, first + count), chunksize=4)


def _outcomes(_: Options, seeds: range) -> Outcomes:
    processes = len(os.sched_getaffinity(0))
    yield from run_seeds(seeds.start, len(seeds), processes)


PROOF = Proof(_outcomes, seeds=1_000, seed_start=0)
