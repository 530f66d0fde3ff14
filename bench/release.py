"""The Pulsar version of the measured broker."""

from __future__ import annotations

import os

from keyshard.testing.devbroker import DEFAULT_VERSION

PULSAR = os.environ.get("KEYSHARD_BENCH_PULSAR") or DEFAULT_VERSION
"""``KEYSHARD_BENCH_PULSAR=4.0.8 python -m bench ingest`` measures that version."""
