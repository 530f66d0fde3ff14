"""``python -m tests.memory --draws 200 --seed N``: a table of shapes, peaks and limits.

Ends with 1 where a peak is above its limit; the seed of each shape repeats it.
"""

from __future__ import annotations

import argparse
import random
import sys

from tests.memory.runner import Measured, measure
from tests.memory.shape import WAYS, drawn

COLUMNS = (
    ("seed", 10), ("way", 12), ("window", 7), ("ranges", 6), ("parts", 5), ("value", 8),
    ("key", 6), ("props", 11), ("msgs", 6), ("zip", 4), ("small", 5), ("rows", 9), ("peak", 6),
    ("limit", 6),
)  # fmt: skip


def line(seed: int, found: Measured) -> str:
    """A line of the table; sizes of windows, peaks and limits in MB."""
    one = found.shape
    cells = (
        seed, one.named, one.window_bytes // 10**6, one.ranges, one.partitions, one.value_bytes,
        one.key_bytes, f"{one.properties}x{one.property_bytes}", one.entry_messages,
        f"{one.compression}{'r' if one.random_bytes else '0'}", one.small_first, found.rows,
        found.peak // 10**6, one.limit // 10**6,
    )  # fmt: skip
    text = " ".join(str(cell).rjust(width) for cell, (_, width) in zip(cells, COLUMNS, strict=True))
    return f"{text}  {found.problem}".rstrip()


def main() -> int:
    """Measure as many shapes as asked for; 0: all of them stay below their limits."""
    parser = argparse.ArgumentParser(prog="python -m tests.memory", description=__doc__)
    parser.add_argument("--draws", type=int, default=200, help="shapes (200)")
    parser.add_argument("--seed", type=int, help="of the first; default: another each time")
    parser.add_argument("--way", choices=WAYS, help="the only way to read; default: all")
    given = parser.parse_args()
    first = random.SystemRandom().randrange(10**9) if given.seed is None else given.seed
    print(" ".join(name.rjust(width) for name, width in COLUMNS))
    bad = []
    for seed in range(first, first + given.draws):
        found = measure(drawn(seed, (given.way,) if given.way else WAYS))
        print(line(seed, found), flush=True)
        if found.problem:
            bad.append(seed)
    print(f"{given.draws} shapes, {len(bad)} with problems: {bad}")
    for seed in bad:
        way = f" --way {given.way}" if given.way else ""
        print(f"again: python -m tests.memory --draws 1 --seed {seed}{way}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
