"""A service that handles orders in key order, and publishes what follows from each exactly once.

::

    keyshard broker start
    pulsar-admin namespaces set-deduplication public/default --enable
    keyshard produce orders --messages 20000 --keys 500
    python -m examples.publishing_service orders invoices --checks checks --checkpoint billing.json

Each order becomes an invoice, and one of ten goes to the topic of checks, too. Ctrl-C ends the
service gracefully. After any end, start it again: it goes on where it was, and no invoice is
lost or comes twice.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Iterator

from keyshard import KeyShardSink, KeyShardSource, Message, Produce, Reject

CHECKED = 10
"""One of so many orders is checked."""


def main() -> None:
    """Run the service."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.publishing_service", description=__doc__
    )
    parser.add_argument("orders", help="topic to read")
    parser.add_argument("invoices", help="topic to write")
    parser.add_argument("--checks", required=True, help="topic of the orders to check")
    parser.add_argument("--checkpoint", required=True, help="path or fsspec URL of a file")
    parser.add_argument("--service-url", default="pulsar://127.0.0.1:6650")
    parser.add_argument("--admin-url", help="lets the start check that invoices are deduplicated")
    arguments = parser.parse_args()

    def handle(order: Message) -> Iterator[Produce]:
        if not order.value:
            raise Reject("an order without content")
        number = f"{order.partition}:{order.message_id}"
        yield Produce(order.value, key=order.key, properties={"order": number})
        if zlib.crc32(order.value) % CHECKED == 0:
            yield Produce(order.value, key=order.key, topic=arguments.checks)

    source = KeyShardSource(
        arguments.orders,
        subscription="billing",
        parallelism=8,
        starting_position="earliest",
        service_url=arguments.service_url,
        admin_url=arguments.admin_url,
    )
    sink = KeyShardSink(arguments.invoices, sink_id="billing", connection=source.how_to_connect())
    source.run(handle, sink=sink, checkpoint=arguments.checkpoint)


if __name__ == "__main__":
    main()
