"""Parked keys on a real broker, also when the process is killed while it parks or replays."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tenacity

from keyshard import KeyShardSource, Message, RetryPolicy
from keyshard.broker.admin.rest import PulsarAdmin
from keyshard.broker.connect import connect
from keyshard.broker.port import Producer
from keyshard.columns.messages import messages_of
from keyshard.core.dead_letter import DeadLetter, DeadLetterKind, parse
from keyshard.core.dead_letter_filter import DeadLetterFilter
from keyshard.core.message import MessageId
from keyshard.core.position.entry import EntryId, TopicPartition, full_topic_name
from keyshard.dead_letters.startup import open_dead_letters
from keyshard.dead_letters.store import DeadLetterStore
from keyshard.errors import BrokerUnavailableError, NotRunningError, SubscriptionInUseError
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import create_partitioned_topic
from tests.helpers import present, wait_until
from tests.support.deadlines import deadline, joined
from tests.support.documented_dead_letter import SOMETIMES, documented, written
from tests.support.tested_pulsar import PULSAR

pytestmark = pytest.mark.broker

PARTITIONS = 2
BAD = [f"bad-{number}" for number in range(4)]
GOOD = [f"good-{number}" for number in range(6)]
KNOWN_TIME = datetime(2024, 5, 1, 12, tzinfo=timezone.utc)
KILLS = 4
"""Number of kills while keys park, and while they are unparked."""


class ParkingProcess:
    """A topic on the real broker, its messages, and its dead-letter topic."""

    def __init__(self, broker: DevBroker, name: str) -> None:
        self.service_url, self.admin_url = broker.service_url, broker.admin_url
        self.topic = full_topic_name(name)
        create_partitioned_topic(broker.admin_url, name, PARTITIONS)
        self.where = TopicPartition(f"{self.topic}-keyshard-DLQ")
        self.client = connect(broker.connection)
        self.admin = PulsarAdmin(broker.connection)
        self.published: defaultdict[str, int] = defaultdict(int)
        self._producers: dict[int, Producer] = {}

    def publish(self, *keys: str) -> None:
        for key in keys:
            partition = sum(key.encode()) % PARTITIONS
            if partition not in self._producers:
                self._producers[partition] = self.client.producer(
                    TopicPartition(self.topic, partition), send_timeout_ms=200_000
                )
            self._producers[partition].send(b"%d" % self.published[key], key=key)
            self.published[key] += 1

    def source(self, **changes: Any) -> KeyShardSource:
        given: dict[str, Any] = {
            "subscription": "keyshard", "parallelism": 3, "starting_position": "earliest",
        } | changes  # fmt: skip
        return KeyShardSource(
            self.topic, service_url=self.service_url, admin_url=self.admin_url, **given
        )

    def backlog(self) -> int:
        stats = [
            self.admin.subscription(TopicPartition(self.topic, number), "keyshard")
            for number in range(PARTITIONS)
        ]
        return sum(int(one["msgBacklog"]) for one in stats if one) if all(stats) else -1

    def resting(self) -> int:
        stats = self.admin.subscription(self.where, "keyshard-parked")
        return int(stats["msgBacklog"]) if stats else 0

    def resting_after_restart(self) -> int:
        """Number of resting dead letters, once a broker that has restarted has loaded the topic."""
        loaded = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(BrokerUnavailableError),
            stop=tenacity.stop_after_delay(60),
            reraise=True,
        )
        return loaded(self.resting)

    def stored(self) -> list[Message]:
        if self.client.missing([self.where.topic]):
            return []
        with closing(self.client.reader(self.where, EntryId(0, 0))) as reader:
            found = []
            while not reader.at_end():
                for block in reader.read(100):
                    found += messages_of(self.where, block)
        return found

    def dead_letters(self) -> list[DeadLetter]:
        return [one for one in map(parse, self.stored()) if isinstance(one, DeadLetter)]

    def open(self, **changes: Any) -> DeadLetterStore:
        return open_dead_letters(self.client, self.where.topic, self.source(**changes), fail=print)

    def close(self) -> None:
        self.admin.close()
        self.client.close()


@pytest.fixture
def parking(dev_broker: DevBroker, topic_name: str) -> Iterator[ParkingProcess]:
    made = ParkingProcess(dev_broker, topic_name)
    yield made
    made.close()


def dead_letter(parking: ParkingProcess, number: int, key: str = "k") -> DeadLetter:
    message = Message(
        b"%d" % number, key, None, MessageId(7, number, 0), parking.topic, 0,
        publish_time=KNOWN_TIME, event_time=None, properties={"n": str(number)}, slot=None,
        redelivered=False,
    )  # fmt: skip
    return DeadLetter(message, "keyshard", DeadLetterKind.PARKED, 3, "broken")


def test_the_dead_letter_topic_is_created_for_the_first_dead_letter(
    parking: ParkingProcess,
) -> None:
    first = parking.open()
    first.close()
    with_none = parking.open()
    assert with_none.discard_rejected(DeadLetterFilter(rejected=True)) == 0
    assert parking.client.missing([parking.where.topic]) == {parking.where.topic}
    assert parking.admin.subscription(parking.where, "keyshard-parked") is None
    with_none.send(dead_letter(parking, 0))
    assert parking.client.missing([parking.where.topic]) == frozenset()
    with pytest.raises(SubscriptionInUseError):
        parking.open(subscribe_timeout_ms=300)
    with_none.close()
    again = parking.open()
    assert list(again.keys.parking.states()) == ["k"]
    assert parking.resting() == 1
    again.close()


def test_a_dead_letter_on_a_broker_has_the_documented_properties(parking: ParkingProcess) -> None:
    first = parking.open()
    small = dead_letter(parking, 0)
    first.send(small)
    large = small.message._replace(
        value=bytes(6 * 1024 * 1024), message_id=MessageId(7, 1, 0), schema_version=0,
        key_bytes=b"k",
    )  # fmt: skip
    first.send(replace(small, message=large))
    assert written(parking.stored()) == [documented() - SOMETIMES, documented()]
    first.close()


def test_dead_letters_are_kept_and_replayed_by_the_next_source(parking: ParkingProcess) -> None:
    first = parking.open()
    for number in range(5):
        first.send(dead_letter(parking, number))
    with pytest.raises(SubscriptionInUseError):
        parking.open(subscribe_timeout_ms=300)
    first.close()

    # 1. The dead letters were confirmed, and their writer died before it acknowledged anything.
    second = parking.open()
    for number in range(7):
        second.send(dead_letter(parking, number))
    assert [int(present(one.message.value)) for one in parking.dead_letters()] == list(range(7)), (
        "each once"
    )
    # 2. Two are replayed; the broker may forget that they were acknowledged, but not the markers.
    assert second.keys.unpark("k")
    resting = second.first("k")
    assert resting is not None
    replay = second.replay("k", resting)
    for _ in range(2):
        assert resting is not None
        second.done("k", resting)
        resting = replay.next()
    second.close()

    third = parking.open()
    assert third.keys.unpark("k")
    resting = third.first("k")
    assert resting is not None
    replay, found = third.replay("k", resting), []
    while resting is not None:
        found.append(int(present(resting.dead_letter.message.value)))
        third.done("k", resting)
        resting = replay.next()
    assert found == [2, 3, 4, 5, 6]
    assert third.keys.parking.state("k") is None
    third.close()
    wait_until(lambda: parking.resting() == 0)
    fourth = parking.open()
    assert not fourth.keys.parking.states()
    fourth.close()


def started(source: KeyShardSource) -> bool:
    try:
        return source.status()["state"] != "starting"
    except NotRunningError:
        return False


def test_a_message_too_large_for_one_dead_letter_parks_and_is_unparked(
    parking: ParkingProcess,
) -> None:
    broken, values = [True], []
    whole = b"x" * (5 * 1024 * 1024 - 400)

    def handle(message: Message) -> None:
        if broken:
            raise ValueError("cannot handle it")
        values.append(message.value)

    parking.publish("bad-0")
    where = TopicPartition(parking.topic, sum(b"bad-0") % PARTITIONS)
    parking.client.producer(where, send_timeout_ms=20_000).send(whole, key="bad-0")
    parking.publish("bad-0")
    policy = RetryPolicy(wait=tenacity.wait_none(), stop=tenacity.stop_after_attempt(2))
    for _ in range(2):
        source = parking.source()
        run = threading.Thread(target=lambda source=source: source.run(handle, retry=policy))
        run.start()
        wait_until(lambda: len(parking.dead_letters()) >= 3 and parking.backlog() == 0)
        if not broken:
            wait_until(partial(started, source))
            assert source.unpark("bad-0")
            wait_until(lambda: len(values) == 3 and parking.resting() == 0)
        source.stop()
        joined(run, deadline(30))
        broken.clear()
    assert values == [b"0", whole, b"1"]


CHILD = """
import json, os, sys, threading
import tenacity
from keyshard import KeyShardSource, RetryPolicy

settings = json.loads(sys.argv[1])
source = KeyShardSource(
    settings["topic"], subscription="keyshard", service_url=settings["service_url"],
    admin_url=settings["admin_url"], parallelism=3, starting_position="earliest",
)
log = os.open(settings["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def handle(message):
    if message.key.startswith("bad") and os.path.exists(settings["broken"]):
        raise ValueError("cannot handle it")
    os.write(log, f"{message.key} {message.value.decode()}\\n".encode())

def listen():
    for line in sys.stdin:
        while True:
            try:
                source.unpark(line.strip())
                break
            except Exception:
                threading.Event().wait(0.02)

threading.Thread(target=listen, daemon=True).start()
source.run(handle, lanes=4, retry=RetryPolicy(
    wait=tenacity.wait_none(), stop=tenacity.stop_after_attempt(2)))
"""


class Host:
    """Processes that run the source, one after the other, and the calls of their handlers."""

    def __init__(self, parking: ParkingProcess, folder: Path) -> None:
        self._log = folder / "handled"
        self.broken = folder / "broken"
        self.broken.touch()
        self._settings = json.dumps({
            "topic": parking.topic, "service_url": parking.service_url,
            "admin_url": parking.admin_url, "log": str(self._log), "broken": str(self.broken),
        })  # fmt: skip
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD, self._settings],
            stdin=subprocess.PIPE, text=True,
        )  # fmt: skip

    def unpark(self, *keys: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write("".join(f"{key}\n" for key in keys))
        self._process.stdin.flush()

    def kill(self) -> None:
        assert self._process is not None
        assert self._process.poll() is None, "the source ended by itself"
        self._process.kill()
        self._process.wait(deadline(20))
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def handled(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for line in self._log.read_text().splitlines() if self._log.exists() else ():
            key, number = line.split()
            found.setdefault(key, []).append(int(number))
        return found

    def count(self) -> int:
        return sum(len(set(values)) for values in self.handled().values())


def test_killed_at_any_moment_of_parking_and_replaying_it_loses_nothing_and_keeps_order(
    parking: ParkingProcess, tmp_path: Path
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    moments = random.Random(seed)
    host = Host(parking, tmp_path)

    def rest(messages: int) -> bool:
        return parking.resting() >= messages

    def are_handled(messages: int) -> bool:
        return host.count() >= messages

    for _ in range(KILLS):
        for _ in range(15):
            parking.publish(*BAD, *GOOD)
        before = len(parking.dead_letters()) if parking.resting() else 0
        host.start()
        more = moments.randrange(1, 40)
        wait_until(partial(rest, before + more))
        host.kill()
    host.start()
    wait_until(lambda: parking.backlog() == 0)
    assert not any(key in host.handled() for key in BAD), "a parked key was handled"
    parked: defaultdict[str | None, list[int]] = defaultdict(list)
    for one in parking.dead_letters():
        parked[one.key].append(int(present(one.message.value)))
    firsts = {key: list(dict.fromkeys(values)) for key, values in parked.items()}
    assert firsts == {key: list(range(parking.published[key])) for key in BAD}

    host.broken.unlink()
    left: list[int] = []
    for _ in range(KILLS):
        host.unpark(*BAD)
        done = host.count()
        more = moments.randrange(1, 50)
        wait_until(partial(are_handled, done + more), deadline(120))
        host.kill()
        left.append(
            sum(parking.published[key] - len(set(host.handled().get(key, ()))) for key in BAD)
        )
        parking.publish(*BAD, *GOOD)
        host.start()
    assert left[0], "it was killed when everything was replayed"
    host.unpark(*BAD)
    wait_until(lambda: host.count() == sum(parking.published.values()), deadline(120))
    wait_until(lambda: parking.backlog() == 0 and parking.resting() == 0)
    host.kill()
    handled = {key: list(dict.fromkeys(values)) for key, values in host.handled().items()}
    assert handled == {key: list(range(count)) for key, count in parking.published.items()}


def test_keys_park_and_are_unparked_while_the_broker_is_killed(topic_name: str) -> None:
    broken = set(BAD)
    handled: defaultdict[str | None, list[int]] = defaultdict(list)

    def handle(message: Message) -> None:
        if message.routing_key in broken:
            raise ValueError("cannot handle it")
        handled[message.routing_key].append(int(present(message.value)))

    with DevBroker(PULSAR) as broker:
        parking = ParkingProcess(broker, topic_name)
        source = parking.source()
        policy = RetryPolicy(wait=tenacity.wait_none(), stop=tenacity.stop_after_attempt(2))
        errors: list[BaseException] = []

        def run() -> None:
            try:
                source.run(handle, lanes=4, retry=policy)
            except BaseException as exc:  # noqa: BLE001 - the test reports it
                errors.append(exc)

        thread = threading.Thread(target=run)
        thread.start()
        stopping = threading.Event()

        def publish() -> None:
            while not stopping.wait(0.02):
                parking.publish(*BAD, *GOOD)

        producer = threading.Thread(target=publish)
        producer.start()
        wait_until(lambda: errors or parking.resting() > 60)
        # 1. Some keys come out while others park.
        out, still = BAD[:2], BAD[2:]
        broken.difference_update(out)
        for key in out:
            assert source.unpark(key)
        wait_until(lambda: errors or all(handled[key] for key in out))
        # 2. The broker dies with dead letters and markers in flight, and forgets acknowledgements.
        broker.kill()
        broker.start()
        stopping.set()
        joined(producer, deadline(120))
        # 3. The others come out.
        broken.clear()
        for key in still:
            assert source.unpark(key)
        total = sum(parking.published.values())
        wait_until(
            lambda: errors or sum(len(set(v)) for v in handled.values()) == total, deadline(120)
        )
        assert not errors
        source.stop()
        joined(thread, deadline(60))
        parking.close()
    firsts = {key: list(dict.fromkeys(values)) for key, values in handled.items()}
    assert firsts == {key: list(range(count)) for key, count in parking.published.items()}


def test_done_dead_letters_are_acknowledged_again_after_a_broker_was_killed(
    topic_name: str, tmp_path: Path
) -> None:
    broken = set(BAD)
    handled: defaultdict[str | None, list[int]] = defaultdict(list)

    def handle(message: Message) -> None:
        if message.routing_key in broken:
            raise ValueError("cannot handle it")
        handled[message.routing_key].append(int(present(message.value)))

    with DevBroker(PULSAR) as broker:
        parking = ParkingProcess(broker, topic_name)

        def run() -> tuple[KeyShardSource, threading.Thread]:
            source = parking.source()
            policy = RetryPolicy(wait=tenacity.wait_none(), stop=tenacity.stop_after_attempt(2))
            options: Any = {"lanes": 4, "retry": policy, "checkpoint": str(tmp_path / "state.json")}
            thread = threading.Thread(target=lambda: source.run(handle, **options))
            thread.start()
            wait_until(lambda: started(source))
            return source, thread

        source, thread = run()
        for _ in range(20):
            parking.publish(*BAD)
        wait_until(lambda: len(parking.dead_letters()) == 80 and parking.backlog() == 0)
        broken.clear()
        assert source.unpark(all=True) == len(BAD)
        # No message comes any more, but the checkpoint still advances.
        wait_until(lambda: parking.resting() == 0)
        source.stop()
        joined(thread, deadline(60))
        broker.kill()
        broker.start()
        forgotten = parking.resting_after_restart()
        assert forgotten, "the broker forgot nothing; it was not killed in time"
        source, thread = run()
        wait_until(lambda: parking.resting() == 0)
        source.stop()
        joined(thread, deadline(60))
        parking.close()
    assert handled == {key: list(range(20)) for key in BAD}
