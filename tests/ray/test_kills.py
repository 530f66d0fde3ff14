"""Deaths of actors and of the driver, with a checkpoint, on a real broker."""

from __future__ import annotations

from pathlib import Path

import pytest

from keyshard.testing.devbroker import DevBroker
from tests.ray.kills import Kills

pytestmark = [pytest.mark.ray, pytest.mark.broker, pytest.mark.timeout(180)]


def test_nothing_in_the_checkpoint_comes_again_and_the_order_stays(
    dev_broker: DevBroker, tmp_path: Path
) -> None:
    kills = Kills(dev_broker, tmp_path, messages=6_000, deadline_s=150.0)
    kills.run(driver_kills=1, actor_kills=2)
    assert kills.broken() == []
    assert len(kills.durable) == 1
    assert kills.actors_killed == 2
