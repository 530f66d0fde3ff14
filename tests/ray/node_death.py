"""The death of a node, in a cluster of its own: ``python -m tests.ray.node_death FOLDER``."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

import ray_adapter
from keyshard.testing.verify.history import HistoryWriter
from keyshard.testing.verify.recorder import Recorder
from tests.ray.ray_place import RayPlace, Recorded


def main(folder: Path) -> None:
    """Two actors, each alone on a node; one node is killed, and a third one takes its place."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    nodes = {node.node_id: node for node in (cluster.add_node(num_cpus=1) for _ in range(3))}
    ray.init(address=cluster.address, log_to_driver=False)
    place = RayPlace("node-death", folder)
    place.publish(keys=30, per_key=100)
    recorded = partial(Recorded, str(place.history), seconds=0.002)
    with ray_adapter.run(place.source(), recorded, parallelism=2, num_cpus=1, max_rows=300) as job:
        results = iter(job)
        place.taken += [next(results) for _ in range(700)]
        actor = job._exchange.seats[0].actor.handle._actor_id.hex()
        found = ray._private.state.actors()[actor]
        node = nodes[found["Address"]["NodeID"]]
        # A machine that dies takes all of its processes with it.
        for raylet in node.all_processes["raylet"]:
            raylet.process.kill()
        os.kill(found["Pid"], signal.SIGKILL)
        # At once: what is handled again may begin before Ray has removed the node.
        with HistoryWriter(place.history) as writer:
            Recorder(writer, f"actor {found['Pid']}").crashed()
        cluster.remove_node(node, allow_graceful=False)
        place.take(results, job)
        assert [actor["deaths"] for actor in job.status()["actors"]] == [1, 0]
    place.check_taken()
    place.check_history()
    assert place.backlog() == 0
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
