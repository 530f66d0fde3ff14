"""Rows of a stream: the messages of each key once, in order."""

from __future__ import annotations

from keyshard import SourceStream
from keyshard.testing.verify.workloads import parse_value
from tests.support.deadlines import deadline

WAIT_S = deadline(60)
"""Longest wait for a batch, seconds."""


class StreamRows:
    """Rows of a stream; each key's numbers have to come once, in order."""

    def __init__(self) -> None:
        self.last: dict[str, int] = {}
        self.rows = 0

    def take(self, stream: SourceStream, count: int) -> None:
        """Take and commit batches until there are so many rows."""
        while self.rows < count:
            batch = stream.next_batch(WAIT_S)
            assert batch is not None, f"{self.rows} of {count} rows came"
            for part in batch:
                for value in part.column("value").to_pylist():
                    key, number = parse_value(value)
                    assert number == self.last.get(key, -1) + 1, (key, number, self.last.get(key))
                    self.last[key] = number
                    self.rows += 1
            stream.commit(batch)
