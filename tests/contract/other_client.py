"""A client in its own process, controlled by lines of JSON; see ``PulsarOtherClient``."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import _pulsar
import pulsar


def main(service_url: str, topic: str, subscription: str, start: str, end: str) -> None:
    client = pulsar.Client(service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    consumer = client.subscribe(
        topic,
        subscription,
        consumer_type=pulsar.ConsumerType.KeyShared,
        initial_position=pulsar.InitialPosition.Earliest,
        key_shared_policy=pulsar.ConsumerKeySharedPolicy(
            pulsar.KeySharedMode.Sticky, sticky_ranges=[(int(start), int(end))]
        ),
        batch_index_ack_enabled=True,
    )
    received: list[Any] = []
    answer("ready")
    for line in sys.stdin:
        command, *values = json.loads(line)
        if command == "receive":
            found = [consumer.receive(20_000) for _ in range(values[0])]
            received += found
            ids = [message.message_id() for message in found]
            answer([(one.ledger_id(), one.entry_id()) for one in ids])
        elif command == "connected":
            answer(consumer.is_connected())
        elif command == "acknowledge and die":
            for ledger, entry in values[0]:
                consumer._consumer.acknowledge(_pulsar.MessageId(-1, ledger, entry, -1))
            os.kill(os.getpid(), signal.SIGKILL)
        elif command == "acknowledge indices":
            for message in received:
                if message.message_id().batch_index() in values[0]:
                    consumer.acknowledge(message)
            consumer.close()
            client.close()
            answer("closed")


def answer(value: object) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
