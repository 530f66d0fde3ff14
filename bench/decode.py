"""What does decoding a message cost, with compiled code and in Python?

Messages have 100 bytes and a key. One thread decodes all columns that a source always has, without
a broker. A round decodes the same entries by both decoders in turn. Figures are microseconds of
processor time per message, medians of ``ROUNDS``.
"""

from __future__ import annotations

import statistics
import time

from keyshard.broker.wire import native_decoder
from keyshard.broker.wire.decoding import decode
from keyshard.broker.wire.encoding import EntryHead, encoded
from keyshard.broker.wire.entries import RawEntry
from keyshard.columns.outgoing import OutgoingMessage
from keyshard.core.position.entry import EntryId, TopicPartition

ROUNDS = 9
TAKES = 100
SHAPES = {"small": (20, 3), "large": (4, 1_000)}
"""Entries that are decoded together, and messages of an entry."""
_WHERE = TopicPartition("persistent://public/default/bench", 0)


def entries_of(count: int, messages: int) -> list[RawEntry]:
    """Encode entries; each has one key."""
    head = EntryHead(b"bench", 1_700_000_000_000)
    found = []
    for number in range(count):
        rows = [OutgoingMessage(b"v" * 100, f"k{number}", None, None, None)] * messages
        data = encoded(rows, head, number * messages)
        found.append(RawEntry(EntryId(1, number), data, 0))
    return found


def _us(entries: list[RawEntry], messages: int) -> float:
    start = time.process_time()
    for _ in range(TAKES):
        left = entries
        while left:
            left = left[decode(left, _WHERE).seen :]
    return (time.process_time() - start) / TAKES / messages * 1e6


def run() -> dict[str, float]:
    """Measure both decoders.

    Raises:
        RuntimeError: The install built no compiled decoder.
    """
    if not native_decoder.is_available():
        raise RuntimeError(f"There is nothing to compare, because {native_decoder.why_missing()}.")
    library = native_decoder._library
    figures: dict[str, float] = {}
    for name, (count, messages) in SHAPES.items():
        entries = entries_of(count, messages)
        taken: dict[str, list[float]] = {"compiled": [], "python": []}
        try:
            for _ in range(ROUNDS):
                for decoder, times in taken.items():
                    native_decoder._library = library if decoder == "compiled" else None
                    times.append(_us(entries, count * messages))
        finally:
            native_decoder._library = library
        for decoder, times in taken.items():
            figures[f"{name}_{decoder}_us"] = statistics.median(times)
    return figures
