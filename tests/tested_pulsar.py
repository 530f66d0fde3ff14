"""The Pulsar version of brokers that are spoken to over ports: of contract, chaos and others."""

from __future__ import annotations

import os

from keyshard.testing.devbroker import DEFAULT_VERSION

PULSAR = os.environ.get("KEYSHARD_TEST_PULSAR") or DEFAULT_VERSION
"""``KEYSHARD_TEST_PULSAR=3.3.6 pytest tests/contract`` takes another one; it is fetched first."""
