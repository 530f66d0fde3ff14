"""Ray jobs with failing handlers, with dying actors, and jobs that cannot start."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import threading
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import tenacity

import keyshard
import ray_adapter
from keyshard import RetryPolicy
from keyshard.errors import (
    ClusterError,
    ConfigError,
    HandlerFailedError,
    HandlerProcessError,
    KeyShardError,
    UnfitHandlerError,
    WorkerEnvironmentError,
)
from keyshard.testing.devbroker.process import free_port
from ray_adapter import cluster
from tests.helpers import keyshard_threads, present, wait_until
from tests.ray import ray_topic
from tests.ray.ray_topic import Fails, RayTopic, Recorded, key_and_seq
from tests.support.deadlines import deadline, in_time

pytestmark = [pytest.mark.ray]
TWICE = RetryPolicy(wait=tenacity.wait_fixed(0.01), stop=tenacity.stop_after_attempt(2))


def failing(orders: RayTopic, handler: Any, **options: Any) -> tuple[list[Any], KeyShardError]:
    """Results before a job ends, and the error that ends it."""
    before = keyshard_threads()
    orders.publish(keys=3, per_key=5)
    given: dict[str, Any] = {"parallelism": 1, "retry": TWICE}
    results: list[Any] = []
    with (
        pytest.raises(KeyShardError) as failed,
        ray_adapter.run(orders.source(), handler, **(given | options)) as job,
    ):
        results.extend(job)
    wait_until(lambda: not keyshard_threads() - before)
    return results, failed.value


def first_actor(job: ray_adapter.Job) -> Any:
    """Ray's handle of the first actor; there is none while another takes its place."""
    handles: list[Any] = []

    def found() -> bool:
        handles.append(job._exchange.actor_slots[0].actor.handle)
        return handles[-1] is not None

    wait_until(found)
    return handles[-1]


# -- deaths ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["kill", "exit", "terminate"])
def test_an_actor_that_dies_in_a_batch_handles_it_again_before_anything_else(
    orders: RayTopic, how: str
) -> None:
    orders.publish(keys=20, per_key=30)
    recorded = partial(Recorded, str(orders.history), dies_at="k3:11:", how=how)
    with ray_adapter.run(orders.source(), recorded, parallelism=2, max_rows=50) as job:
        orders.take(job, job)
        assert sum(present(actor["restarts"]) for actor in job.status()["actors"]) == 1
    orders.check_taken()
    orders.check_history()
    assert orders.backlog() == 0


def test_killed_actors_are_replaced(orders: RayTopic) -> None:
    """Only results that the caller took are judged, because Ray may end an actor at any time."""
    orders.publish(keys=20, per_key=60)
    recorded = partial(Recorded, str(orders.history), seconds=0.002)
    with ray_adapter.run(orders.source(), recorded, parallelism=2, max_rows=100) as job:
        results = iter(job)
        for no_restart in (True, False):
            orders.taken += [next(results) for _ in range(200)]
            ray.kill(first_actor(job), no_restart=no_restart)
        orders.take(results, job)
    orders.check_taken()
    assert orders.backlog() == 0


def test_an_actor_may_die_while_the_number_of_actors_changes(orders: RayTopic) -> None:
    orders.publish(keys=20, per_key=30)
    recorded = partial(Recorded, str(orders.history), dies_at="k3:2:", seconds=0.002)
    died = Path(f"{orders.history}.died")
    with ray_adapter.run(orders.source(), recorded, parallelism=1, max_wait_s=1.0) as job:
        results = iter(job)
        # The message that ends the actor may come after the first two portions. Taken
        # results make room for more messages.
        while not died.exists():
            orders.taken.append(next(results))
        job.rescale(2)
        orders.take(results, job)
    orders.check_taken()
    orders.check_history()


def test_a_handler_that_ends_its_process_each_time_ends_the_job(orders: RayTopic) -> None:
    results, error = failing(orders, ray_topic.ends_its_process)
    assert isinstance(error, HandlerFailedError)
    assert "failed 2 times" in error.message
    assert "The actor ended" in error.message
    assert "key 'k" in error.message
    assert results == []
    assert orders.backlog() == 15


def test_a_sigterm_ends_the_actor_and_is_no_failure_of_the_handler(
    orders: RayTopic, caplog: pytest.LogCaptureFixture
) -> None:
    """Ray raises SystemExit in the handler. It was taken for an error of the handler's."""
    _, error = failing(orders, ray_topic.terminates_its_process)
    assert isinstance(error, HandlerFailedError)
    assert "The actor ended" in error.message
    assert "SystemExit: 1" not in error.message + caplog.text
    assert orders.backlog() == 15


def test_a_stop_does_not_wait_for_an_actor_that_restarts(orders: RayTopic) -> None:
    orders.publish(keys=3, per_key=5)
    retry = RetryPolicy(wait=tenacity.wait_fixed(600), stop=tenacity.stop_never)
    with ray_adapter.run(
        orders.source(), ray_topic.ends_its_process, parallelism=1, retry=retry
    ) as job:
        wait_until(lambda: job.status()["actors"][0]["restarts"])
    assert orders.backlog() == 15


# -- what handlers raise and return ----------------------------------------------------------------


def test_a_message_that_fails_is_tried_again_in_its_place(orders: RayTopic) -> None:
    orders.publish(keys=3, per_key=10)
    with ray_adapter.run(orders.source(), partial(Fails, "k1:4:", 1), parallelism=1) as job:
        orders.take(job, job)
    orders.check_taken()


@pytest.mark.parametrize("returns", [False, True])
def test_the_last_failure_ends_the_job_and_nothing_behind_it_is_acknowledged(
    orders: RayTopic, *, returns: bool
) -> None:
    results, error = failing(orders, partial(Fails, "k1:2:", returns=returns))
    assert isinstance(error, HandlerFailedError)
    assert isinstance(error.__cause__, ValueError)
    for part in (
        "tests.ray.ray_topic.Fails failed 2 times", "key 'k1'", "ValueError: no k1:2:",
        orders.topic,
        "Unacknowledged messages are delivered again",
    ):  # fmt: skip
        assert part in error.message
    assert error.facts["key"] == "k1"
    with ray_adapter.run(orders.source(), key_and_seq, parallelism=1) as job:
        again = [result for _, result in zip(range(15 - len(results)), job, strict=False)]
    assert {("k1", 2), ("k1", 3), ("k1", 4)} <= set(again)


def test_an_unpicklable_handler_is_named(orders: RayTopic) -> None:
    _, error = failing(orders, partial(Fails, "k1:2:", error=ray_topic.Unpicklable))
    assert "Unpicklable: no k1:2:" in error.message
    _, error = failing(orders, ray_topic.gives_a_lock)
    assert isinstance(error, HandlerFailedError)
    assert "cannot be sent from its actor: cannot pickle '_thread.lock' object" in error.message
    assert "key 'k1'" in error.message
    _, error = failing(orders, ray_topic.gives_a_generator)
    assert "returns a generator" in error.message
    _, error = failing(orders, ray_topic.exits)
    assert "SystemExit: enough" in error.message


def test_large_results_come(orders: RayTopic) -> None:
    orders.publish(keys=1, per_key=5)
    with ray_adapter.run(orders.source(), ray_topic.gives_much, parallelism=1) as job:
        assert [len(next(results)) for results in [iter(job)] for _ in range(5)] == 5 * [10**7]


# -- jobs that do not begin ------------------------------------------------------------------------


def test_a_handler_that_does_not_begin_is_named(orders: RayTopic) -> None:
    _, error = failing(orders, ray_topic.DoesNotBegin)
    assert isinstance(error, UnfitHandlerError)
    assert "failed to start in its actor: FileNotFoundError: model.bin" in error.message
    _, error = failing(orders, ray_topic.BeginsForEver, start_timeout_s=25.0)
    assert "was not loaded within 25 s" in error.message


def test_a_handler_that_actors_cannot_import_is_named(
    orders: RayTopic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("def handle(message): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    only_here = importlib.import_module("only_here")

    _, error = failing(orders, only_here.handle)
    assert isinstance(error, UnfitHandlerError)
    assert "cannot load the handler only_here.handle" in error.message
    assert "No module named 'only_here'" in error.message
    assert "runtime_env={'working_dir': '.'}" in error.message


def test_another_version_of_keyshard_is_refused_by_name(
    orders: RayTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyshard, "__version__", "99.0")
    _, error = failing(orders, key_and_seq)
    assert isinstance(error, WorkerEnvironmentError)
    assert "keyshard is 99.0 in this process, but 0.1.0 in an actor" in error.message


def test_actors_without_a_place_are_an_error(orders: RayTopic) -> None:
    _, error = failing(orders, key_and_seq, parallelism=2, num_cpus=7, start_timeout_s=4.0)
    assert isinstance(error, ClusterError)
    assert "of 2 actors were placed within 4 s. Each needs 7 CPU." in error.message
    assert "The cluster has 8 CPU" in error.message


def test_resources_that_no_node_has_are_named_soon(orders: RayTopic) -> None:
    """The error came only after 60 s, the default of ``start_timeout_s``."""
    began_s = time.monotonic()
    _, error = failing(orders, key_and_seq, parallelism=2, num_gpus=1)
    in_time(began_s + deadline(10), "the refusal took longer")
    assert isinstance(error, ClusterError)
    assert "No node of the cluster has 1 GPU, which each actor needs." in error.message
    assert "The cluster has 8 CPU" in error.message


def test_a_first_failure_is_logged_with_file_and_line(
    orders: RayTopic, caplog: pytest.LogCaptureFixture
) -> None:
    """A job that failed was silent for 14 s, and its error showed only lines of keyshard."""
    code = ray_topic.Fails.__call__.__code__
    lines = [line for *_, line in code.co_lines() if line]
    _, error = failing(orders, partial(Fails, "k1:2:"))
    at = re.search(r"\(at (.*):(\d+)\)", error.message)
    assert at
    assert at[1] == code.co_filename
    assert int(at[2]) in lines
    output = "".join(traceback.format_exception(error))
    assert f'File "{code.co_filename}", line {at[2]}, in __call__' in output
    (first,) = [one for one in caplog.records if "next attempt in 0.0 s" in one.getMessage()]
    assert first.levelname == "WARNING"
    assert f"key 'k1', failed, next attempt in 0.0 s: ValueError: no k1:2: {at[0]}" in (
        first.getMessage()
    )
    assert first.exc_info
    assert f'File "{code.co_filename}", line {at[2]}' in caplog.text


def test_a_cluster_that_is_not_there_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port([])}")
    with pytest.raises(ClusterError, match="which RAY_ADDRESS names, cannot be reached"):
        cluster.connect()


def test_a_cluster_that_ray_remembers_and_that_is_gone_is_an_error_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ray itself tried for almost 7 minutes."""
    file = tmp_path / "ray_current_cluster"
    file.write_text(f"127.0.0.1:{free_port([])}\n")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster, "get_ray_address_file", lambda _folder: str(file))
    for address in ("", "auto"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ClusterError, match="ray_current_cluster names, cannot be reached"):
            cluster.connect()


SHUT_DOWN = '''
import sys, threading, time
import ray
from ray._private.worker import global_worker
import ray_adapter
from keyshard import KeyShardSource
from keyshard.broker.memory import MemoryCluster, Message
from keyshard.errors import ClusterError

def handle(message):
    time.sleep(0.05)
    return message.value

ray.init(
    address="local", num_cpus=2, include_dashboard=False, log_to_driver=False,
    object_store_memory=100_000_000,
)

class SlowlyShutDown:
    """A thread that comes back from Ray's core late, as on a machine with much to do."""

    def __init__(self, core):
        self.core = core

    def __getattr__(self, name):
        return getattr(self.core, name)

    def shutdown_driver(self):
        self.core.shutdown_driver()
        time.sleep(1.0)

global_worker.core_worker = SlowlyShutDown(global_worker.core_worker)
inits = []
ray_init = ray.init
ray.init = lambda *args, **kwargs: (inits.append(args), ray_init(*args, **kwargs))
memory = MemoryCluster.named("c")
topic = memory.create_topic("orders")
memory.publish(topic, *(Message(b"%d" % number, key=str(number)) for number in range(1_000)))
source = KeyShardSource(
    topic, subscription="s", service_url="memory://c", starting_position="earliest", parallelism=2
)
job = ray_adapter.run(source, handle, max_rows=50)
try:
    for number, _ in enumerate(job):
        if number == 3:
            print(job, flush=True)
            if sys.argv[1] == "here":
                ray.shutdown()
            else:
                shutting_down = threading.Thread(target=ray.shutdown)
                shutting_down.start()
except ClusterError as error:
    print(error, flush=True)
if sys.argv[1] != "here":
    shutting_down.join()
print("inits", len(inits), ray.is_initialized(), flush=True)
print(job, flush=True)
'''


@pytest.mark.parametrize("where", ["here", "in another thread"])
def test_a_shutdown_of_ray_ends_the_job_by_name_and_starts_nothing(
    tmp_path: Path, where: str
) -> None:
    """Ray's own functions started another cluster, and the job ended with an error of Ray.

    Then the program exited with 1: a thread dropped its reference to an answer while the core of
    Ray was gone and Ray did not know it yet.
    """
    (tmp_path / "script.py").write_text(SHUT_DOWN)
    environ = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "script.py", where], cwd=tmp_path, env=environ,
        capture_output=True, text=True, timeout=deadline(90), check=False,
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "[KEYSHARD_CLUSTER] Ray was shut down during the job." in done.stdout, output
    assert "inits 0 False" in done.stdout, output
    assert "<Job of 's' on 'persistent://public/default/orders': running, 2 actors>" in done.stdout
    assert "<Job of 's' on 'persistent://public/default/orders': ended, 2 actors>" in done.stdout
    assert "Traceback" not in output


def test_an_actor_that_dies_while_it_loads_is_an_error(orders: RayTopic) -> None:
    _, error = failing(orders, ray_topic.DiesEarly)
    assert isinstance(error, HandlerProcessError)
    assert "ended while it loaded the handler" in error.message


@pytest.mark.parametrize(
    ("handler", "options", "text"),
    [
        (3, {}, "The handler is 3; it must be a function"),
        (lambda: None, {}, "cannot be called with a message"),
        (ray_topic.NoCall, {}, "NoCall is a class whose objects cannot be called"),
        (ray_topic.CountsFrom, {}, "missing a required argument: 'first'"),
        (key_and_seq, {"takes": "rows"}, "takes is 'rows'.\nRemedy: Write 'messages' or 'arrow'"),
        (key_and_seq, {"parallelism": 0}, "parallelism is 0"),
        (key_and_seq, {"max_rows": True}, "max_rows is True"),
        (key_and_seq, {"max_wait_s": -1}, "max_wait_s is -1"),
        (key_and_seq, {"num_cpus": "2"}, "num_cpus is '2'; it must be a number"),
        (key_and_seq, {"resources": {"tpu": -1}}, "resources"),
        (key_and_seq, {"resources": {"CPU": 1}}, "Ray rejects the resources of the actors"),
        (key_and_seq, {"scheduling_strategy": "NEAR"}, "Ray rejects the resources of the actors"),
        (key_and_seq, {"runtime_env": {"conda": 3}}, "Ray rejects the resources of the actors"),
        (key_and_seq, {"runtime_env": "."}, "runtime_env is '.'; it must be a dict"),
        (key_and_seq, {"retry": 3}, "retry is 3; it must be a keyshard.RetryPolicy"),
        (key_and_seq, {"checkpoint": ""}, "checkpoint is ''"),
        (lambda _m, lock=threading.Lock(): lock, {}, "cannot be sent to an actor"),  # noqa: B008
    ],
)
def test_a_wrong_option_is_reported_before_anything_starts(
    orders: RayTopic, handler: Any, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text.replace("(", r"\(")):
        ray_adapter.run(orders.source(), handler, **options)
