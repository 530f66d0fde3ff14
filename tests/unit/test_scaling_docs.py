"""``docs/scaling.md`` names existing settings, with the figures of the code."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from bench import scale_sim
from keyshard.config.source import SourceConfig
from keyshard.config.workers import WORKERS_MAX
from keyshard.core.load_diagnosis import ENTRIES_PER_S_MAX
from keyshard.core.position.entry import DELIVERY_BYTES, ENTRY_BYTES, ROW_BYTES
from keyshard.core.releases import release_of
from keyshard.core.ring.hash_range import RING_SIZE
from keyshard.core.subscription_state import _SETTINGS, BrokerLimits
from keyshard.core.window.receiver_queue_size import FIRST_MIN
from keyshard.workers.worker import LEASE_S

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/scaling.md").read_text()


def rows_of(where: str) -> list[str]:
    """The settings of the table, by place."""
    rows = re.findall(rf"^\| {where} \| ([^|]+) \|", TEXT, re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([A-Za-z_]+)`", row)]


def test_every_setting_of_the_source_and_of_the_broker_exists() -> None:
    assert set(rows_of("source")) <= {one.name for one in fields(SourceConfig)}
    assert rows_of("source")
    of_broker = set(rows_of("broker"))
    assert of_broker <= set(_SETTINGS.values())
    assert len(of_broker) >= 4


def test_figures_that_stand_in_the_code_are_those_of_the_code() -> None:
    limits, config = BrokerLimits(), SourceConfig("orders")
    for text in (
        f"has {RING_SIZE:,} slots",
        f"W up to {WORKERS_MAX} ",
        f"given up after {LEASE_S:.0f} s",
        f"`window_rows_max` ({config.window_rows_max:,})",
        f"`checkpoint_bytes_max` ({config.checkpoint_bytes_max // 1024} KiB)",
        f"about {ENTRIES_PER_S_MAX:,} entries/s",
        f"consumer at {limits.unacked_per_consumer:,}",
        f"topic partition at {limits.unacked_per_subscription:,}",
        f"Pulsar 4 keeps {limits.ack_gaps:,}",
        f"Pulsar 5 keeps {release_of('5.0.0').limits.ack_gaps:,}",
        f"gets {FIRST_MIN} messages",
        f"{ROW_BYTES} bytes (`ROW_BYTES`) a message",
        f"{ENTRY_BYTES} an entry (`ENTRY_BYTES`)",
        f"{DELIVERY_BYTES:,} a delivery (`DELIVERY_BYTES`)",
        f"{scale_sim.RANGES:,} ranges over {scale_sim.PARTITIONS:,} topic partitions",
    ):
        assert text in " ".join(TEXT.split()), text
