"""Other processes of the contract on a real broker."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.ring.hash_range import HashRange
from tests.contract.contract_harness import SUBSCRIPTION
from tests.support.deadlines import deadline

ROOT = Path(__file__).parents[2]


class _Controlled:
    """Runs a module of this folder, which is controlled by lines of JSON."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"tests.contract.{module}", *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == "ready"

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait(deadline(20))
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def _ask(self, *command: object) -> Any:
        self._tell(*command)
        return self._answer()

    def _tell(self, *command: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the other process ended"
        return json.loads(line)


class PulsarOtherClient(_Controlled):
    """Runs ``other_client.py``."""

    def __init__(
        self, service_url: str, topic_partition: TopicPartition, hash_range: HashRange
    ) -> None:
        start, end = str(hash_range.start), str(hash_range.end)
        super().__init__(
            "other_client", service_url, topic_partition.name, SUBSCRIPTION, start, end
        )

    def receive(self, messages: int) -> list[EntryId]:
        found = [EntryId(*pair) for pair in self._ask("receive", messages)]
        return list(dict.fromkeys(found))

    def acknowledge_and_die(self, entries: Sequence[EntryId]) -> None:
        self._tell("acknowledge and die", list(entries))
        assert self._process.wait(deadline(20)) == -signal.SIGKILL

    def acknowledge_indices(
        self,
        entry_id: EntryId,  # noqa: ARG002 - it received no other
        indices: Sequence[int],
    ) -> None:
        assert self._ask("acknowledge indices", list(indices)) == "closed"

    def is_connected(self) -> bool:
        return bool(self._ask("connected"))


class PulsarOtherProducer(_Controlled):
    """Runs ``other_producer.py``."""

    def __init__(self, service_url: str, topic_partition: TopicPartition, name: str) -> None:
        super().__init__("other_producer", service_url, topic_partition.name, name)

    def publish(self, start: int, stop: int) -> str:
        return str(self._ask("publish", start, stop))

    def send(self, start: int, stop: int) -> None:
        assert self._ask("send", start, stop) == "sent"
