"""The answers of the metrics port of a source."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families

from keyshard.observe.metrics import SUBSCRIPTION
from tests.support.deadlines import deadline


def get(port: int, path: str) -> httpx.Response:
    """Return the answer of a port on this machine."""
    url = f"http://127.0.0.1:{port}{path}"
    return httpx.get(url, timeout=deadline(20), trust_env=False)


def samples(port: int) -> dict[str, list[float]]:
    """Return the values of each sample by name; fails if one has no label of a subscription."""
    answer = get(port, "/metrics")
    answer.raise_for_status()
    found: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            assert SUBSCRIPTION in sample.labels, sample
            found.setdefault(sample.name, []).append(sample.value)
    return found


def serves(port: int) -> bool:
    """Return whether the port answers."""
    try:
        get(port, "/livez")
    except httpx.TransportError:
        return False
    return True
