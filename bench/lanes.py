"""What share of the lanes' time do handlers get: by number of keys, by ranges, without work?

Each figure is measured in a separate process on one broker, after all messages are published.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from bench.child import child
from bench.loads import efficiency, even_keys, handler_s, mixed_keys, publish, values
from bench.release import PULSAR
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import Workload, create_partitioned_topic, produce

KEYS = (1, 2, 5, 10, 20, 50, 100, 1_000, 10_000)
UNBATCHED_KEYS = 1_000
FEW_KEYS, TURNS = 10, 3
LANES = 16
MESSAGES, HANDLER_MS = 10_000, (0.0, 5.0)

RANGES = (5, 10, 20, 50, 100)
PARTITIONS = 5
RANGE_HANDLER_MS = 10.0
RANGE_HANDLERS = {"ranges": "threads", "ranges_async": "coroutine"}
PER_LANE = 1_000
"""Messages per range, which has one lane: 10 s of handler time."""
KEYS_PER_SLICE = 2
"""Keys in each hundredth of the ring."""
RUN = 5
"""Consecutive messages of one key, which share an entry."""

NOOP_MESSAGES, NOOP_KEYS, NOOP_RANGES = 200_000, 1_000, 10

_console = Console(stderr=True)


def by_keys(broker: DevBroker) -> dict[str, float]:
    """Measure 10,000 messages of 0 to 5 ms on one topic partition with 16 lanes, by keys.

    The producer batches by key. With ``_unbatched`` it does not batch, so every message is an
    entry. From ``FEW_KEYS`` keys on, figures are medians of ``TURNS`` runs.
    """
    figures: dict[str, float] = {}
    for keys, batched in [*((keys, True) for keys in KEYS), (UNBATCHED_KEYS, False)]:
        name = f"{keys}" if batched else f"{keys}_unbatched"
        load = mixed_keys(keys, MESSAGES)
        publish(broker.service_url, f"lanes-{name}", load, batched=batched)
        low, high = HANDLER_MS
        found = [
            handled(
                broker, f"lanes-{name}", MESSAGES, parallelism=1, lanes=LANES, handler="threads",
                low_ms=low, high_ms=high,
            )
            for _ in range(TURNS if keys >= FEW_KEYS else 1)
        ]  # fmt: skip
        figures[f"lanes_efficiency_{name}"] = _median_efficiency(
            load, min(keys, LANES), [run["seconds"] for run in found]
        )
        figures[f"lanes_seconds_{name}"] = statistics.median(run["total_s"] for run in found)
        _console.print(
            f"{name} keys: {figures[f'lanes_seconds_{name}']:.3f} s with the connection, "
            f"efficiency {figures[f'lanes_efficiency_{name}']:.3f}"
        )
    return figures | yardsticks(
        broker, f"lanes-{UNBATCHED_KEYS}", mixed_keys(UNBATCHED_KEYS, MESSAGES)
    )


def yardsticks(broker: DevBroker, topic: str, load: Sequence[str]) -> dict[str, float]:
    """Measure :mod:`bench.plain_threads`: as many threads as lanes, with and without a client."""
    low, high = HANDLER_MS
    arguments = {
        "service_url": broker.service_url, "topic": topic, "messages": len(load),
        "threads": LANES, "low_ms": low, "high_ms": high,
    }  # fmt: skip
    found = [child("bench.plain_threads", json.dumps(arguments)) for _ in range(TURNS)]
    figures = {
        f"lanes_{name}_efficiency": _median_efficiency(
            load, LANES, [run[f"{name}_s"] for run in found]
        )
        for name in ("plain", "sleeping")
    }
    _console.print(", ".join(f"{name} {value:.3f}" for name, value in figures.items()))
    return figures


def _median_efficiency(load: Sequence[str], at_once: int, seconds: Sequence[float]) -> float:
    mean_s = statistics.fmean(handler_s(value, *HANDLER_MS) for _, value in values(load))
    return statistics.median(efficiency(len(load), one, at_once, mean_s) for one in seconds)


def by_ranges(broker: DevBroker) -> dict[str, float]:
    """Measure handlers of 10 ms by number of ranges, one lane each, over 5 topic partitions."""
    keys = even_keys(max(RANGES), KEYS_PER_SLICE)
    rates: dict[str, dict[int, float]] = {name: {} for name in RANGE_HANDLERS}
    for ranges in RANGES:
        topic = f"ranges-{ranges}"
        create_partitioned_topic(broker.admin_url, topic, PARTITIONS)
        load = [key for key in keys for _ in range(RUN)] * (PER_LANE * ranges // len(keys) // RUN)
        publish(broker.service_url, topic, load, batched=True)
        for name, handler in RANGE_HANDLERS.items():
            found = handled(
                broker, topic, len(load), parallelism=ranges, lanes=1, handler=handler,
                low_ms=RANGE_HANDLER_MS, high_ms=RANGE_HANDLER_MS,
            )  # fmt: skip
            rates[name][ranges] = len(load) / found["seconds"]
            _console.print(f"{ranges} {name}: {rates[name][ranges]:,.0f} messages/s")
    figures: dict[str, float] = {}
    for name, of_name in rates.items():
        for ranges, rate in of_name.items():
            figures[f"{name}_speedup_{ranges}"] = rate / of_name[RANGES[0]]
            figures[f"{name}_efficiency_{ranges}"] = rate * RANGE_HANDLER_MS / 1e3 / ranges
    return figures


def nothing(broker: DevBroker) -> dict[str, float]:
    """Compare a handler that does nothing with the loop of :mod:`bench.bare` on the same topic."""
    topic = "noop"
    create_partitioned_topic(broker.admin_url, topic, PARTITIONS)
    produce(Workload(NOOP_MESSAGES, NOOP_KEYS), broker.service_url, topic)
    bare_arguments = {
        "service_url": broker.service_url, "topic": topic, "partitions": PARTITIONS,
        "messages": NOOP_MESSAGES, "touching": True,
    }  # fmt: skip
    rates = {"bare": child("bench.bare", json.dumps(bare_arguments))}
    for name, handler in (("noop", "nothing"), ("noop_async", "nothing_async")):
        found = handled(
            broker, topic, NOOP_MESSAGES, parallelism=NOOP_RANGES, lanes=LANES, handler=handler
        )
        rates[name] = NOOP_MESSAGES / found["total_s"]
    _console.print(", ".join(f"{name} {rate:,.0f} messages/s" for name, rate in rates.items()))
    return {
        "noop_over_bare": rates["noop"] / rates["bare"],
        "noop_async_over_bare": rates["noop_async"] / rates["bare"],
        **{f"{name}_rows_per_s": rate for name, rate in rates.items()},
    }


def handled(broker: DevBroker, topic: str, messages: int, **settings: Any) -> dict[str, float]:
    """Return the result of :func:`bench.handled.run` from a separate process."""
    arguments = {"service_url": broker.service_url, "topic": topic, "messages": messages}
    found: dict[str, float] = child("bench.handled", json.dumps(arguments | settings))
    return found


def run() -> dict[str, float]:
    """Return all figures."""
    with DevBroker(PULSAR, optimised=True) as broker:
        return by_keys(broker) | by_ranges(broker) | nothing(broker)
