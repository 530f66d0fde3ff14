"""The worlds of queries and of programs with handlers, over frames."""

from __future__ import annotations

from keyshard.broker.port import Broker
from tests.simulation.frames.client import FramedClient, FramedHandlerClient, Frames
from tests.simulation.handling.network import HandlerClient
from tests.simulation.handling.program import Program
from tests.simulation.handling.scalable import ScalableHandlerWorld
from tests.simulation.handling.world import HandlerWorld
from tests.simulation.scalable import ScalableWorld
from tests.simulation.scheduler import Process
from tests.simulation.world import Outcome, World


class FramedWorld(World):
    """A run of the query."""

    def run(self) -> Outcome:
        self._frames = Frames(str(self.seed), self.scheduler)
        with self._frames.installed():
            return super().run()

    def connection(self, process: Process) -> Broker:
        self.network.frames = self._frames
        return FramedClient(self.network, process)


class FramedHandlerWorld(HandlerWorld):
    """A run of programs with handlers."""

    def run(self) -> Outcome:
        self._frames = Frames(str(self.seed), self.scheduler)
        with self._frames.installed():
            return super().run()

    def connection(self, program: Program, process: Process) -> HandlerClient:
        program.network.frames = self._frames
        return FramedHandlerClient(program, process)


class FramedScalableWorld(FramedWorld, ScalableWorld):
    """A run of the query of a scalable topic. Its watch of segments does not go by frames."""


class FramedScalableHandlerWorld(FramedHandlerWorld, ScalableHandlerWorld):
    """A run of programs with handlers of scalable topics."""
