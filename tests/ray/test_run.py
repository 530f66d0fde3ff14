"""Ray jobs on a real Ray, over the in-memory broker of this process."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pulsar
import pyarrow as pa
import pytest

import ray_adapter
from keyshard import KeyShardSource, Message
from keyshard.broker.memory import Batching
from keyshard.broker.memory import Message as Stored
from keyshard.core.ring.hash_range import range_index
from keyshard.errors import ConfigError, DrainTimeoutError, HandlerFailedError, NotRunningError
from keyshard.testing.devbroker import DevBroker
from tests.helpers import keyshard_threads, present, wait_until
from tests.ray.ray_topic import (
    CountsFrom,
    RayTopic,
    Recorded,
    data_and_version,
    even_only,
    key_and_seq,
    rows_and_keys,
    slowly,
    soon,
    version,
)
from tests.support.deadlines import deadline, in_time

pytestmark = [pytest.mark.ray]


def test_results_come_in_order_per_key_and_are_acknowledged(orders: RayTopic) -> None:
    before = keyshard_threads()
    orders.publish(keys=20, per_key=50)
    with ray_adapter.run(orders.source(), key_and_seq, parallelism=3, max_rows=40) as job:
        orders.take(job, job)
        status = job.status()
        assert [actor["hashRange"] for actor in status["actors"]] == [
            "0-21845", "21846-43690", "43691-65535",
        ]  # fmt: skip
        assert sum(present(actor["handled"]) for actor in status["actors"]) == 1_000
    orders.check_taken()
    assert orders.backlog() == 0
    assert not keyshard_threads() - before


def test_an_actor_constructs_a_handler_class_once_and_a_function_may_be_async(
    orders: RayTopic,
) -> None:
    orders.publish(keys=20, per_key=5)
    counting = partial(CountsFrom, 100, step=2)
    seen: dict[int, list[int]] = {}
    with ray_adapter.run(orders.source(), counting, parallelism=2, max_rows=7) as job:
        for number, (pid, count) in enumerate(job, start=1):
            seen.setdefault(pid, []).append(count)
            if number == 100:
                job.drain()
    assert len(seen) == 2
    for counts in seen.values():
        assert counts == [100 + 2 * number for number in range(1, len(counts) + 1)]
    orders.publish(keys=20, per_key=5)
    with ray_adapter.run(orders.source(), soon, parallelism=1) as job:
        orders.take(job, job, count=100)
    assert min(orders.taken) == ("k0", 5)


def test_a_function_of_this_program_travels_by_value(orders: RayTopic) -> None:
    orders.publish(keys=4, per_key=5)
    suffix = b"!"
    with ray_adapter.run(orders.source(), lambda one: one.value + suffix, parallelism=1) as job:
        results = [result for _, result in zip(range(20), job, strict=False)]
    assert min(results) == b"k0:0:!"


@pytest.mark.broker
def test_a_handler_has_the_data_of_a_message_with_a_separated_key(
    dev_broker: DevBroker, topic_name: str
) -> None:
    kinds = {"key.schema.type": "STRING", "value.schema.type": "STRING"}
    body = {
        "type": "KEY_VALUE", "schema": '{"key": "", "value": ""}',
        "properties": {**kinds, "kv.encoding.type": "SEPARATED"},
    }  # fmt: skip
    url = f"{dev_broker.admin_url}/admin/v2/schemas/public/default/{topic_name}/schema"
    httpx.post(url, json=body).raise_for_status()
    with closing(pulsar.Client(dev_broker.service_url)) as client:
        client.create_producer(topic_name).send("né".encode(), partition_key="abcd")
    source = KeyShardSource(
        topic_name, subscription="keyshard",
        service_url=dev_broker.service_url, starting_position="earliest",
        metadata_columns=["__keyBytes"],
    )  # fmt: skip
    with ray_adapter.run(source, data_and_version, parallelism=1) as job:
        assert next(iter(job)) == ({"key": "abcd", "value": "né"}, None)


def test_a_handler_knows_the_version_and_no_schema_of_another_process(orders: RayTopic) -> None:
    orders.cluster.publish(orders.topic, Stored(b"x", "k", schema_version=3))
    with ray_adapter.run(orders.source(), version, parallelism=1) as job:
        assert next(iter(job)) == (3,)
    with (
        ray_adapter.run(orders.source(), data_and_version, parallelism=1) as job,
        pytest.raises(HandlerFailedError, match=r"failed once.*cluster of another process"),
    ):
        next(iter(job))


def test_arrow_batches_are_of_one_part_of_the_ring_in_key_order(orders: RayTopic) -> None:
    orders.publish(keys=20, per_key=50)
    parts: list[set[int]] = []
    with ray_adapter.run(
        orders.source(), rows_and_keys, takes="arrow", parallelism=2, max_rows=100
    ) as job:
        for table in job:
            assert isinstance(table, pa.Table)
            assert table.num_rows <= 100
            orders.taken += map(key_and_seq, map(Message.for_test, table["value"].to_pylist()))
            parts.append({range_index(slot, 2) for slot in table["__slot"].to_pylist()})
            if len(orders.taken) == 1_000:
                job.drain()
    orders.check_taken()
    assert {len(part) for part in parts} == {1}
    assert orders.backlog() == 0


def test_a_message_without_a_result_is_acknowledged_when_passed(orders: RayTopic) -> None:
    orders.publish(keys=10, per_key=10)
    with ray_adapter.run(orders.source(), even_only, parallelism=2) as job:
        orders.take(job, job, count=50)
    assert {seq % 2 for _, seq in orders.taken} == {0}
    assert orders.backlog() == 0


def test_unacknowledged_messages_of_a_caller_that_leaves_come_again(orders: RayTopic) -> None:
    orders.publish(keys=10, per_key=10)
    with ray_adapter.run(orders.source(), key_and_seq, parallelism=2) as job:
        for number, result in enumerate(job, start=1):
            if number == 38:
                in_hand = result
                break
            orders.taken.append(result)
    assert orders.backlog() == 100 - 37
    with ray_adapter.run(orders.source(), key_and_seq, parallelism=3) as job:
        orders.take(job, job)
    orders.check_taken()
    assert in_hand in orders.taken[37:]
    assert orders.backlog() == 0


def test_with_a_checkpoint_nothing_taken_comes_again(orders: RayTopic, tmp_path: Path) -> None:
    orders.publish(keys=10, per_key=40)
    checkpoint = tmp_path / "checkpoint.json"
    for count in (57, 123):
        with ray_adapter.run(
            orders.source(), key_and_seq, parallelism=1, checkpoint=checkpoint, max_rows=10
        ) as job:
            for number, result in enumerate(job):
                if number == count:
                    break
                orders.taken.append(result)
        orders.cluster.crash()  # it forgets acknowledgements
    with ray_adapter.run(orders.source(), key_and_seq, parallelism=3, checkpoint=checkpoint) as job:
        orders.take(job, job)
    orders.check_taken()


def test_a_job_gives_its_results_once(orders: RayTopic) -> None:
    orders.publish(keys=1, per_key=2)
    with ray_adapter.run(orders.source(), key_and_seq, parallelism=1) as job:
        results = iter(job)
        assert next(results) == ("k0", 0)
        with pytest.raises(NotRunningError, match="can be read once"):
            iter(job)
        with pytest.raises(ConfigError, match="already runs"):
            ray_adapter.run(job._source, key_and_seq, parallelism=1)
    with pytest.raises(NotRunningError, match="has ended"):
        iter(job)
    assert list(results) == []
    job.close()
    job.stop()
    assert job.status()["state"] == "ended"


def test_two_jobs_of_one_process_go_side_by_side(orders: RayTopic) -> None:
    count = orders.publish(keys=10, per_key=10)
    sources = [orders.source(subscription=name) for name in ("one", "two")]
    with (
        ray_adapter.run(sources[0], key_and_seq, parallelism=1) as first,
        ray_adapter.run(sources[1], key_and_seq, parallelism=1) as second,
    ):
        pairs = zip(first, second, strict=True)
        taken = [next(pairs) for _ in range(count)]
    assert sorted(a for a, _ in taken) == sorted(b for _, b in taken)


def test_a_job_on_an_empty_topic_ends_at_a_drain_and_at_a_stop(orders: RayTopic) -> None:
    with ray_adapter.run(orders.source(), key_and_seq, parallelism=1) as job:
        threading.Timer(0.3, job.drain).start()
        assert list(job) == []
    with ray_adapter.run(orders.source(), key_and_seq, parallelism=1) as job:
        threading.Timer(0.3, job._source.stop).start()
        job.wait()


def test_receiving_stops_while_no_result_is_taken(orders: RayTopic) -> None:
    orders.publish(keys=10, per_key=1_000)
    source = orders.source(window_rows_max=500, parallelism=1)
    with ray_adapter.run(source, key_and_seq, parallelism=2, max_rows=10) as job:

        def held() -> int:
            actors = job.status()["actors"]
            assert sum(present(actor["handled"]) for actor in actors) <= 40
            return sum(present(actor["handled"]) + present(actor["waiting"]) for actor in actors)

        wait_until(
            lambda: sum(present(actor["untakenCalls"]) for actor in job.status()["actors"]) == 4
        )
        wait_until(lambda: held() >= 400)
        assert held() < 5_000, "the window bounds what waits"
        results = iter(job)
        for _ in range(3_000):
            orders.taken.append(next(results))
        orders.take(results, job)
    orders.check_taken()


def test_actors_come_and_go_while_it_runs(orders: RayTopic) -> None:
    orders.publish(keys=30, per_key=60)
    recorded = partial(Recorded, str(orders.history), seconds=0.001)
    with ray_adapter.run(orders.source(), recorded, parallelism=2, max_rows=50) as job:
        results = iter(job)
        for actors in (3, 1):
            orders.taken += [next(results) for _ in range(300)]
            job.rescale(actors)
            assert len(job.status()["actors"]) == actors
        orders.take(results, job)
    orders.check_taken()
    orders.check_history()
    assert orders.backlog() == 0


def test_a_drain_has_a_deadline_and_a_rescale_too(orders: RayTopic) -> None:
    orders.publish(keys=1, per_key=3)
    recorded = partial(Recorded, str(orders.history), seconds=60.0)
    with ray_adapter.run(
        orders.source(), recorded, parallelism=1, max_rows=1, drain_timeout_s=0.2
    ) as job:
        wait_until(lambda: job.status()["actors"][0]["inFlight"] == 1)
        with pytest.raises(DrainTimeoutError, match="nothing has changed"):
            job.rescale(2)
        assert len(job.status()["actors"]) == 1
        job.drain()
        with pytest.raises(DrainTimeoutError, match="are delivered again"):
            list(job)
    assert orders.backlog() == 3


def test_rows_without_a_key_and_batches_of_several_keys_are_all_done(orders: RayTopic) -> None:
    keys: list[str | None] = ["a", None, "b", "c", "d", None, "e", "f"]
    for number in range(30):
        where = orders.where[number % 3]
        messages = [Stored(b"%d:%d" % (number, row), key=key) for row, key in enumerate(keys)]
        orders.cluster.publish(where, *messages, batching=Batching.MIXED)
        orders.cluster.publish(orders.topic, Stored(b"%d:8" % number))
    with ray_adapter.run(orders.source(), lambda one: one.value, parallelism=3, max_rows=5) as job:
        results = iter(job)
        values = [next(results) for _ in range(135)]
        job.rescale(2)
        values += [next(results) for _ in range(135)]
        job.drain()
        assert list(results) == []
    assert sorted(values) == sorted(b"%d:%d" % (n, row) for n in range(30) for row in range(9))
    assert orders.backlog() == 0


def test_results_of_slow_messages_come_before_all_messages_are_handled(orders: RayTopic) -> None:
    orders.publish(keys=1, per_key=1_000)
    with ray_adapter.run(orders.source(), slowly, parallelism=1) as job:
        began_s = time.monotonic()
        results = iter(job)
        next(results)
        in_time(began_s + deadline(5), "a first result took as long as all messages")
        job.drain()
        orders.taken = list(results)
    assert 10 < len(orders.taken) < 900


@pytest.mark.parametrize("takes", ["messages", "arrow"])
def test_actors_together_get_no_more_messages_than_the_rate_limit(
    orders: RayTopic, takes: Any
) -> None:
    handle = key_and_seq if takes == "messages" else count_of_rows
    with ray_adapter.run(
        orders.source(), handle, takes=takes, parallelism=2, rate_limit=60, rate_burst=6,
    ) as job:  # fmt: skip
        began_s = time.monotonic()
        left = orders.publish(keys=10, per_key=12)
        for result in job:
            left -= 1 if takes == "messages" else result
            if not left:
                status = job.status()
                assert present(status["source"]["rateLimit"])["perSecond"] == 60
                assert present(status["rateLimit"])["heldBackSeconds"] > 0
                job.drain()
        assert time.monotonic() - began_s >= (120 - 6) / 60  # never sooner, however fast
    assert orders.backlog() == 0


def count_of_rows(rows: pa.RecordBatch) -> int:
    assert rows.num_rows <= 6
    return rows.num_rows
