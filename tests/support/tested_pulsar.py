"""The Pulsar version and the number of brokers of tests that speak to brokers over ports."""

from __future__ import annotations

import os

from keyshard.testing.devbroker import DEFAULT_VERSION

PULSAR = os.environ.get("KEYSHARD_TEST_PULSAR") or DEFAULT_VERSION
"""``KEYSHARD_TEST_PULSAR=3.3.6 pytest tests/contract`` takes another one; it is fetched first."""
JAVA_CLIENT = "4.0.8"
"""Release whose Java client has made the kept values of Java."""
BROKERS = int(os.environ.get("KEYSHARD_TEST_BROKERS") or 1)
"""With ``KEYSHARD_TEST_BROKERS=2`` the session's broker is a cluster of two, with two bookies."""
