"""Options of every public call: an unexpected value is refused by a sentence, or it works."""

from __future__ import annotations

import threading
import time
from dataclasses import fields
from functools import partial
from random import Random
from typing import Any

from keyshard import HandlerConfig, KeyShardSource, RetryPolicy
from keyshard.broker.memory import Message
from keyshard.config.source import SourceConfig
from keyshard.errors import KeyShardError
from tests.fuzz.promises import HANDLED_S, Cluster, Ended, promise, promise_in_time, refused
from tests.fuzz.values import SECRET, Hostile, value
from tests.support.deadlines import deadline

MESSAGES = 6
PARALLELISM_MAX = 64
"""More consumers than this only cost time here."""


def shown(config: object, what: str) -> None:
    """Check that accepted values can be printed, and print no secret."""
    try:
        text = repr(config)
    except Exception as error:
        raise AssertionError(f"{what}: it has no repr: {error!r}") from error
    promise(SECRET not in text, f"{what}: its repr shows a secret")


def _drawn(random: Random, config: type, names: int) -> dict[str, Any]:
    """Hostile values for some fields."""
    chosen = random.sample([field.name for field in fields(config)], names)
    return {name: value(random) for name in chosen}


def _says(options: dict[str, Any]) -> str:
    return ", ".join(
        f"{name}={'hostile' if isinstance(one, Hostile) else repr(one)[:60]}"
        for name, one in options.items()
    )


def source_options(random: Random, name: str) -> None:
    """A source with hostile options is refused when it is made, or consumes."""
    given = _drawn(random, SourceConfig, random.randint(1, 2))
    says = f"KeyShardSource({_says(given)})"
    with Cluster(name, partitions=2) as cluster:
        plain: dict[str, Any] = {
            "topics": "orders", "subscription": "s", "service_url": cluster.url, "parallelism": 2,
            "starting_position": "earliest", "subscribe_timeout_ms": 5_000,
            "operation_timeout_ms": 5_000,
        }  # fmt: skip
        cluster.memory.publish(
            cluster.topic, *(Message(b"x", key=f"k{i}") for i in range(MESSAGES))
        )
        made = refused(lambda: KeyShardSource(**(plain | given)), says)
        if isinstance(made, KeyShardError):
            return
        shown(made, says)
        if made.service_url != cluster.url or made.parallelism > PARALLELISM_MAX:
            return

        def consume() -> int:
            rows = 0
            with made.open() as stream:
                end = time.monotonic() + deadline(3.0)
                while rows < MESSAGES and time.monotonic() < end:
                    batch = stream.next_batch(timeout_s=0.2)
                    if batch is not None:
                        rows += sum(records.num_rows for records in batch)
                        stream.commit(batch)
            return rows

        rows = Ended(consume, says).join()
        if isinstance(rows, KeyShardError):
            promise(
                cluster.backlog(made.subscription) in (0, MESSAGES)
                or not cluster.memory.subscriptions(cluster.memory.partitions(cluster.topic)[0]),
                f"{says}: refused, and something was acknowledged",
            )


def run_options(random: Random, name: str) -> None:
    """``run`` with hostile options is refused before it touches a message, or handles them."""
    given = _drawn(random, HandlerConfig, random.randint(1, 2))
    says = f"run({_says(given)})"
    made = refused(lambda: HandlerConfig(**given), says.replace("run", "HandlerConfig"))
    if not isinstance(made, KeyShardError):
        shown(made, says)
        if made.executor == "processes":
            return
    with Cluster(name, partitions=2) as cluster:
        cluster.memory.publish(
            cluster.topic, *(Message(b"x", key=f"k{i}") for i in range(MESSAGES))
        )
        source = KeyShardSource(
            "orders",
            subscription="keyshard",
            service_url=cluster.url,
            parallelism=2,
            starting_position="earliest",
        )
        handled: list[bytes] = []
        done = threading.Event()

        def handle(message: Any) -> None:
            handled.append(message.value)
            if len(handled) == MESSAGES:
                done.set()

        running = Ended(lambda: source.run(handle, **given), says)
        end = time.monotonic() + HANDLED_S
        while running.alive and not done.wait(0.01) and time.monotonic() < end:
            pass
        running.stop(source.stop)
        error = running.join()
        if isinstance(error, KeyShardError):
            promise(not handled, f"{says}: refused after messages were handled: {error}")
            promise(
                cluster.backlog() in (0, MESSAGES) and not handled, f"{says}: acknowledged: {error}"
            )
        else:
            output = f"{says}: {len(handled)} of {MESSAGES} were handled"
            promise(len(handled) <= MESSAGES, output)
            promise_in_time(len(handled) == MESSAGES, end, output)
            promise(
                not isinstance(made, KeyShardError), f"{says}: run took what its config refuses"
            )


def calls(random: Random, name: str) -> None:
    """Call methods of a running source with hostile arguments; it must continue."""
    with Cluster(name, partitions=2) as cluster:
        source = KeyShardSource(
            "orders",
            subscription="keyshard",
            service_url=cluster.url,
            parallelism=2,
            starting_position="earliest",
        )
        handled: list[bytes | None] = []
        running = Ended(lambda: source.run(lambda message: handled.append(message.value)), "run")
        end = time.monotonic() + HANDLED_S
        cluster.memory.publish(cluster.topic, Message(b"first", key="a"))
        while running.alive and not handled and time.monotonic() < end:
            time.sleep(0.005)
        for _ in range(random.randint(1, 4)):
            one = value(random)
            which = random.choice(("rescale", "unpark", "balance"))
            says = f"{which}({_says({'': one})})"
            if which == "rescale":
                if type(one) is int and one > PARALLELISM_MAX and one <= 65_536:
                    continue
                refused(partial(source.rescale, one), says)
            elif which == "unpark":
                refused(partial(source.unpark, one), says)
            else:
                refused(partial(source.rescale, balance=one), says)
        cluster.memory.publish(cluster.topic, Message(b"last", key="a"))
        end = time.monotonic() + HANDLED_S
        while running.alive and b"last" not in handled and time.monotonic() < end:
            time.sleep(0.005)
        running.stop(source.stop)
        ended = running.join()
        promise(ended is None, f"calls ended the source: {ended}")
        output = f"after hostile calls it handled {handled}"
        promise(handled == [b"first", b"last"][: len(handled)], output)
        promise_in_time(len(handled) == 2, end, output)


def batch_options(random: Random, name: str) -> None:
    """``batches`` and ``open`` with hostile arguments."""
    with Cluster(name, partitions=2) as cluster:
        cluster.memory.publish(
            cluster.topic, *(Message(b"x", key=f"k{i}") for i in range(MESSAGES))
        )
        source = KeyShardSource(
            "orders",
            subscription="keyshard",
            service_url=cluster.url,
            parallelism=2,
            starting_position="earliest",
        )
        given = {
            one: value(random)
            for one in random.sample(["max_rows", "max_wait_s", "checkpoint"], random.randint(1, 2))
        }
        says = f"batches({_says(given)})"

        def first() -> int:
            for batch in source.batches(**given):
                rows: int = batch.records.num_rows
                batch.ack()
                return rows
            return 0

        rows = Ended(first, says).join()
        if isinstance(rows, KeyShardError):
            promise(cluster.backlog() in (0, MESSAGES), f"{says}: refused, and acknowledged some")
        policy = {name: value(random) for name in random.sample(["wait", "stop"], 1)}
        made = refused(lambda: RetryPolicy(**policy), f"RetryPolicy({_says(policy)})")
        if not isinstance(made, KeyShardError):
            shown(made, "RetryPolicy")
