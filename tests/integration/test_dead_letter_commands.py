"""``keyshard dead-letters`` and its Python API on a real broker, end to end."""

from __future__ import annotations

import json
import re
import threading
from collections import defaultdict
from collections.abc import Iterator

import pytest
import tenacity

from keyshard import KeyShardSink, KeyShardSource, Message, Reject, RetryPolicy
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import create_partitioned_topic
from tests.helpers import present, wait_until
from tests.support.command_line import run
from tests.support.control_folder import own_control_folder
from tests.support.deadlines import deadline, joined

pytestmark = pytest.mark.broker

ONCE = RetryPolicy(wait=tenacity.wait_none(), stop=tenacity.stop_after_attempt(1))


@pytest.fixture(autouse=True)
def folder() -> Iterator[None]:
    with own_control_folder():
        yield


class Orders:
    """A source whose handler fails for some values and rejects others."""

    def __init__(self, broker: DevBroker, topic: str) -> None:
        create_partitioned_topic(broker.admin_url, topic, 2)
        self.topic, self.broker = topic, broker
        self.broken = {b"bad"}
        self.handled: defaultdict[str | None, list[bytes]] = defaultdict(list)
        self.source = self.make()

    def make(self) -> KeyShardSource:
        return KeyShardSource(
            self.topic, service_url=self.broker.service_url, admin_url=self.broker.admin_url,
            subscription="billing", parallelism=2, starting_position="earliest",
        )  # fmt: skip

    def handle(self, message: Message) -> None:
        value = present(message.value)
        if value in self.broken:
            raise ValueError("cannot handle it")
        if value == b"wrong":
            raise Reject("it is wrong")
        self.handled[message.key].append(value)

    def publish(self, *messages: tuple[str, bytes]) -> None:
        with KeyShardSink(self.topic, service_url=self.broker.service_url) as sink:
            for key, value in messages:
                sink.send(value, key=key)


def test_dead_letters_are_listed_shown_replayed_and_discarded(
    dev_broker: DevBroker, topic_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    orders = Orders(dev_broker, topic_name)
    dead_letter_topic = f"{topic_name}-billing-DLQ"
    offline = (
        "--dead-letter-topic", dead_letter_topic, "--subscription", "billing",
        "--service-url", dev_broker.service_url,
    )  # fmt: skip
    source = orders.source
    running = threading.Thread(target=lambda: source.run(orders.handle, retry=ONCE))
    running.start()
    try:
        orders.publish(
            ("a", b"bad"), ("a", b'{"n": 1}'), ("b", b"good"), ("c", b"bad"), ("b", b"wrong"),
            ("a", b"last"),
        )  # fmt: skip
        wait_until(lambda: orders.handled["b"] == [b"good"])
        wait_until(lambda: len([*source.dead_letters()]) == 4)
        wait_until(lambda: len([*source.dead_letters(rejected=True)]) == 1)

        # 1. List: from the running source, from the topic, and in Python.
        code, out, _ = run(capsys, "dead-letters", "list", "--json")
        assert code == 0
        listed = json.loads(out)["deadLetters"]
        assert sorted((one["key"], one["error"], one["attempts"]) for one in listed) == [
            ("a", "ValueError", 1),
            ("a", "waiting", 0),
            ("a", "waiting", 0),
            ("c", "ValueError", 1),
        ]
        stored = json.loads(run(capsys, "dead-letters", "list", *offline, "--json")[1])
        assert [one["messageId"] for one in stored["deadLetters"]] == [
            one["messageId"] for one in listed
        ]
        assert len([*orders.make().dead_letters("a")]) == 3
        out = run(capsys, "dead-letters", "list", "--key", "a", "--error", "waiting")[1]
        assert out.count("waiting") == 2
        assert re.search(r"\n2 dead letters, \d messages read\.\n$", out)

        # 2. Show one.
        waiting, _ = (one for one in listed if one["error"] == "waiting")
        for where in ((), offline):
            code, out, _ = run(
                capsys, "dead-letters", "show", waiting["messageId"], "--format", "json", *where
            )
            assert code == 0
            assert '{\n  "n": 1\n}' in out

        # 3. Discard only the poison of one key: the others keep their order.
        poison = ("--key", "a", "--error", "ValueError")
        out = run(capsys, "dead-letters", "discard", *poison, "--dry-run")[1]
        assert out.startswith("A discard takes 1 dead letter of 1 key. ")
        out = run(capsys, "dead-letters", "discard", *poison)[1]
        assert out == "1 dead letter discarded.\n"
        assert source.discard(error="ValueError", key="a", dry_run=True) == 0

        # 4. Replay by a filter: the whole key, in order.
        newest = ("--error", "waiting", "--newer-than", "1h")
        plan = json.loads(run(capsys, "dead-letters", "replay", *newest, "--dry-run", "--json")[1])
        assert plan == {
            "keys": 1, "deadLetters": 2, "matching": 2,
            "first": [{"key": "a", "deadLetters": 2, "matching": 2}],
        }  # fmt: skip
        assert not orders.handled["a"]
        code, out, _ = run(capsys, "dead-letters", "replay", *newest, "--yes")
        assert (code, out) == (
            0, "Unparking 1 key: 2 dead letters in order, then newer messages.\n",
        )  # fmt: skip
        wait_until(lambda: orders.handled["a"] == [b'{"n": 1}', b"last"])

        # 5. The rest: one by age, the rejected one by its kind.
        assert source.discard(older_than_s=3_600, dry_run=True) == 0
        assert source.discard(topic=topic_name, newer_than_s=3_600) == 1
        out = run(capsys, "dead-letters", "discard", "--rejected", "--yes")[1]
        assert out == "1 dead letter discarded.\n"
        wait_until(lambda: not [*source.dead_letters(rejected=True)])
        wait_until(lambda: not [*source.dead_letters()])
        assert source.status()["parkedKeys"] == 0
    finally:
        source.stop()
        joined(running, deadline(30))
