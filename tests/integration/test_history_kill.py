"""A history outlives the process that writes it."""

from __future__ import annotations

import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

from keyshard.testing.verify.history import Event, HistoryWriter, read_history
from tests.helpers import wait_until

WRITER = """
import itertools, sys
from keyshard.testing.verify.history import Event, HistoryWriter
history = HistoryWriter(sys.argv[1])
for seq in itertools.count():
    history.write(Event(0.0, "delivered", topic="t" * 200, seq=2 * seq))
    history.write_all(Event(0.0, "delivered", topic="t" * 200, seq=2 * seq + 1) for _ in range(1))
"""


def test_a_killed_writer_leaves_whole_lines_and_its_successor_continues(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    lines = 0

    def is_longer(size: int) -> bool:
        return path.exists() and path.stat().st_size > size

    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
        try:
            size = path.stat().st_size if path.exists() else 0
            wait_until(partial(is_longer, size + 100_000))
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        with HistoryWriter(path) as history:
            history.write(Event(1.0, "crashed", worker="writer"))
        events = list(read_history(path))
        assert len(events) > lines + 100
        lines = len(events)
    runs = [event.seq for event in events if event.kind == "delivered"]
    starts = [at for at, seq in enumerate(runs) if seq == 0]
    ends = [*starts[1:], len(runs)]
    assert len(starts) == 3
    assert all(runs[a:b] == list(range(b - a)) for a, b in zip(starts, ends, strict=True))
