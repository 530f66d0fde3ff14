"""Handle every message of a topic in key order, more at a time than it has partitions.

::

    keyshard broker start
    keyshard produce orders --messages 20000 --keys 500
    python -m examples.handlers orders --out orders.txt --checkpoint file://$PWD/orders.json

Ctrl-C ends it gracefully; start it again and it goes on where it was.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from keyshard import KeyShardSource, Message, Reject


def main() -> None:
    """Append a line to a file for each message: partition, message id, key and value."""
    parser = argparse.ArgumentParser(prog="python -m examples.handlers", description=__doc__)
    parser.add_argument("topic")
    parser.add_argument("--out", type=Path, required=True, help="file that the handler appends to")
    parser.add_argument("--service-url", default="pulsar://127.0.0.1:6650")
    parser.add_argument("--subscription", default="handlers")
    parser.add_argument("--parallelism", type=int, default=10, help="hash ranges")
    parser.add_argument("--lanes", type=int, default=4, help="concurrent keys in each range")
    parser.add_argument(
        "--checkpoint", help="fsspec URL of the checkpoint; its messages are not delivered again"
    )
    arguments = parser.parse_args()
    out = os.open(arguments.out, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def handle(message: Message) -> None:
        if not message.value:
            raise Reject("an order without content")
        line = f"{message.partition} {message.message_id} {message.key} {message.value.decode()}\n"
        os.write(out, line.encode())

    source = KeyShardSource(
        arguments.topic,
        subscription=arguments.subscription,
        service_url=arguments.service_url,
        parallelism=arguments.parallelism,
        starting_position="earliest",
    )
    source.run(handle, lanes=arguments.lanes, checkpoint=arguments.checkpoint)


if __name__ == "__main__":
    main()
