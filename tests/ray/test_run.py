"""Ray jobs on a real Ray, over the in-memory broker of this process."""

from __future__ import annotations

import pytest

import ray_adapter
from handler_place import Place
from tests.ray.ray_place import key_and_number

pytestmark = pytest.mark.ray


@pytest.fixture
def place(topic_name: str) -> Place:
    return Place(topic_name)


def test_results_come_in_order_per_key_and_are_acknowledged(place: Place) -> None:
    count = place.publish(keys=10, per_key=30)
    seen: dict[str | None, list[int]] = {}
    with ray_adapter.run(place.source(), key_and_number, parallelism=2) as job:
        for number, (key, value) in enumerate(job, start=1):
            seen.setdefault(key, []).append(value)
            if number == count:
                job.drain()
    assert seen == {f"key-{key}": list(range(30)) for key in range(10)}
    assert place.backlog() == 0
