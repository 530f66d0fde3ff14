"""The third world with scalable topics: worker processes that die host whole segments."""

from __future__ import annotations

from tests.simulation.scalable import ScalableWorld
from tests.simulation.workers import WorkersWorld


class ScalableWorkersWorld(ScalableWorld, WorkersWorld):
    """A run of the query of a scalable topic, with consumers in worker processes."""
