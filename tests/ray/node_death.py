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
from tests.ray.ray_topic import RayTopic, Recorded


def main(folder: Path) -> None:
    """Two actors, each alone on a node; one node is killed, and a third one takes its place."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    nodes = {node.node_id: node for node in (cluster.add_node(num_cpus=1) for _ in range(3))}
    ray.init(address=cluster.address, log_to_driver=False)
    orders = RayTopic(folder)
    orders.publish(keys=30, per_key=100)
    recorded = partial(Recorded, str(orders.history), seconds=0.002)
    with ray_adapter.run(orders.source(), recorded, parallelism=2, num_cpus=1, max_rows=300) as job:
        results = iter(job)
        orders.taken += [next(results) for _ in range(700)]
        actor = job._exchange.actor_slots[0].actor.handle._actor_id.hex()
        found = ray._private.state.actors()[actor]
        node = nodes[found["Address"]["NodeID"]]
        # A machine that dies takes all of its processes with it.
        for raylet in node.all_processes["raylet"]:
            raylet.process.kill()
        os.kill(found["Pid"], signal.SIGKILL)
        # Record the crash now: handling may start again before Ray has removed the node.
        with HistoryWriter(orders.history) as writer:
            Recorder(writer, f"actor {found['Pid']}").crashed()
        cluster.remove_node(node, allow_graceful=False)
        orders.take(results, job)
        assert [actor["restarts"] for actor in job.status()["actors"]] == [1, 0]
    orders.check_taken()
    orders.check_history()
    assert orders.backlog() == 0
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
