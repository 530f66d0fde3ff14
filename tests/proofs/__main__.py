"""Runs the seeds of one proof. Ends with 1 if a promise broke, and prints how to repeat the seed.

``python -m tests.proofs fuzz --seeds 2000``; ``python -m tests.proofs NAME --help`` lists options.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from tests.proofs.runner import Proof, run

PROOFS = {
    "simulation": (
        "tests.simulation.proof",
        "the runtime with simulated threads, time, faults",
    ),
    "fuzz": ("tests.fuzz.runner", "the public API with hostile options, values and exceptions"),
    "wire": ("tests.wire_simulation.run", "the wire transport with brokers that break anywhere"),
    "hostile": ("tests.simulation.frames.hostile", "the wire transport with hostile brokers"),
    "refusals": (
        "tests.refusals.matrix",
        "each refusal at each moment; a seed is a cell",
    ),
    "entries": ("tests.stored_entries", "both decoders on random and damaged entries"),
    "memory": ("tests.memory.runner", "peak memory by shape of messages"),
    "ways": ("tests.ways.proof", "random topics, read in every way and compared"),
    "streams": ("tests.streams.proof", "Spark queries with drawn schemas, options and faults"),
    "chaos": ("tests.chaos.proof", "a stream, handlers or a pipeline on a broker with faults"),
    "scalable": ("tests.chaos.scalable", "a scalable topic that splits and merges, under kills"),
    "bounded": ("tests.chaos.bounded", "bounded reads of drawn topics under the same faults"),
    "segments": ("tests.chaos.segments", "reads from bookies that fail; a seed is one more run"),
    "java": ("tests.java_messages", "messages of the Java client, by both decoders"),
    "worker-kills": ("tests.worker_kills", "workers that are killed; a seed is one more run"),
}
"""Modules and subjects of the proofs. A module loads when its proof runs: Spark loads slowly."""


def proof(name: str) -> Proof:
    """Load a proof."""
    found: Proof = import_module(PROOFS[name][0]).PROOF
    return found


def main(words: Sequence[str]) -> int:
    """Run the proof that the first word names, with the options that follow."""
    width = max(map(len, PROOFS))
    parser = argparse.ArgumentParser(
        prog="python -m tests.proofs",
        usage="%(prog)s NAME [options]",
        description=__doc__,
        epilog="\n".join(f"{name:{width}}  {subject}" for name, (_, subject) in PROOFS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=PROOFS, metavar="NAME", help="one of the names below")
    name: str = parser.parse_args(words[:1]).name
    return run(name, proof(name), words[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
