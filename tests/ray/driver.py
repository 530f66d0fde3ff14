"""The program that the tests kill: ``python -m tests.ray.driver``.

Each result becomes a line of a file before the next one is asked for: topic partition, entry, key
and sequence number.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from typing import Any

import ray

import ray_adapter
from keyshard import KeyShardSource, Message
from keyshard.core.position.entry import TopicPartition
from tests.ray.ray_topic import Recorded


class Located(Recorded):
    """A handler that returns the message with its position."""

    def __call__(self, message: Message) -> Any:
        ledger, entry, _ = message.message_id
        where = TopicPartition(message.topic, message.partition)
        return where, ledger, entry, *super().__call__(message)


def main() -> None:
    """Run until a kill or a SIGTERM."""
    parser = argparse.ArgumentParser()
    for name in ("address", "service-url", "topic", "history", "out", "checkpoint"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--actors", type=int, required=True)
    parser.add_argument("--admin-url")
    parser.add_argument("--wait", action="store_true", help="drop results")
    arguments = parser.parse_args()
    ray.init(address=arguments.address, log_to_driver=False)
    source = KeyShardSource(
        arguments.topic, subscription="ray", service_url=arguments.service_url, parallelism=4,
        starting_position="earliest", admin_url=arguments.admin_url,
    )  # fmt: skip
    out = os.open(arguments.out, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    with ray_adapter.run(
        source, partial(Located, arguments.history), parallelism=arguments.actors,
        checkpoint=arguments.checkpoint, max_rows=200,
    ) as job:  # fmt: skip
        if arguments.wait:
            job.wait()
        for result in () if arguments.wait else job:
            os.write(out, (" ".join(map(str, result)) + "\n").encode())


if __name__ == "__main__":
    main()
