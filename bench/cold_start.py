"""One process from its start to its first batch, with only the imports that it needs."""

from __future__ import annotations

import sys
import time
import uuid
from typing import Any

BEGAN = time.perf_counter()


def main(service_url: str, topic: str, transport: Any) -> None:
    """Print the seconds until keyshard is imported, the source is open, and a batch is there."""
    from keyshard import KeyShardSource  # noqa: PLC0415 - the import is measured

    times = [time.perf_counter() - BEGAN]
    source = KeyShardSource(
        topic, service_url=service_url, subscription=f"cold-{uuid.uuid4().hex[:8]}",
        parallelism=10, starting_position="earliest", transport=transport,
    )  # fmt: skip
    with source.open() as stream:
        times.append(time.perf_counter() - BEGAN)
        batch = stream.next_batch(60)
        if batch is None:
            sys.exit("received nothing")
        times.append(time.perf_counter() - BEGAN)
        stream.commit(batch)
    print([*times, time.process_time()])


if __name__ == "__main__":
    main(*sys.argv[1:])
