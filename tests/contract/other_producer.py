"""A producer in its own process, controlled by lines of JSON; see ``PulsarOtherProducer``."""

from __future__ import annotations

import json
import sys

from keyshard.broker.wire.broker import WireBroker
from keyshard.config.connection import Connection
from keyshard.core.position.entry import TopicPartition
from tests.contract.entries import named, numbered, outcome
from tests.contract.other_client import answer


def main(service_url: str, topic: str, name: str) -> None:
    producer = named(WireBroker(Connection(service_url)), TopicPartition.parse(topic), name)
    answer("ready")
    for line in sys.stdin:
        command, start, stop = json.loads(line)
        if command == "publish":
            answer(outcome(producer, start, stop))
        elif command == "send":
            producer.publish(numbered(start, stop), start)
            answer("sent")


if __name__ == "__main__":
    main(*sys.argv[1:])
