"""Score messages with a pool of actors that each load a model once, in key order.

::

    keyshard broker start
    keyshard produce orders --messages 20000 --keys 500
    echo '{"weights": {"0": 1.5, "1": -0.5}, "keep": 0.9}' > model.json
    python -m examples.ray_score orders --model model.json --out scores.txt \\
        --checkpoint score.json --messages 20000

A score depends on those before it of the same key, so order matters. Ctrl-C ends it; start it again
and it goes on: with ``--checkpoint`` what was acknowledged is never scored again.
"""

from __future__ import annotations

import argparse
import json
import os
from contextlib import suppress
from functools import partial
from pathlib import Path

import ray_adapter
from keyshard import KeyShardSource, Message


class Score:
    """A model that sums weights of characters and adds a share of the key's last score.

    Args:
        path: File with the model. Each actor loads it when it starts.
    """

    def __init__(self, path: str) -> None:
        model = json.loads(Path(path).read_text())
        self.weights: dict[str, float] = model["weights"]
        self.keep: float = model["keep"]
        # The state ends with its actor, and does not move at a rescale. Keep durable state in a
        # store.
        self.last: dict[str | None, float] = {}

    def __call__(self, message: Message) -> tuple[str | None, str, float]:
        new = sum(self.weights.get(one, 0.0) for one in (message.value or b"").decode())
        score = new + self.keep * self.last.get(message.routing_key, 0.0)
        self.last[message.routing_key] = score
        return message.routing_key, str(message.message_id), score


def main() -> None:
    """Append a line to a file for each message: key, message id and score."""
    parser = argparse.ArgumentParser(prog="python -m examples.ray_score", description=__doc__)
    parser.add_argument("topic")
    parser.add_argument("--model", required=True, help="file that every actor can read")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--service-url", default="pulsar://127.0.0.1:6650")
    parser.add_argument("--subscription", default="ray-score")
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument(
        "--checkpoint",
        help="path or fsspec URL of the checkpoint; its messages are not delivered again",
    )
    parser.add_argument("--messages", type=int, help="end after this number of messages")
    arguments = parser.parse_args()
    source = KeyShardSource(
        arguments.topic,
        subscription=arguments.subscription,
        service_url=arguments.service_url,
        starting_position="earliest",
    )
    out = os.open(arguments.out, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    model = partial(Score, os.path.abspath(arguments.model))  # noqa: PTH100 - other folder in actors
    with (
        ray_adapter.run(
            source, model, parallelism=arguments.actors, checkpoint=arguments.checkpoint
        ) as job,
        suppress(KeyboardInterrupt),
    ):
        for number, (key, message_id, score) in enumerate(job, start=1):
            os.write(out, f"{key} {message_id} {score:.6f}\n".encode())
            if number == arguments.messages:
                job.drain()


if __name__ == "__main__":
    main()
