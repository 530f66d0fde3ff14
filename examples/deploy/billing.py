"""A service that handles the messages of a topic.

Environment variables hold all settings that differ between environments. The other files of this
folder run the service in a container, by compose, in Kubernetes and by systemd. SIGTERM ends it in
order: running handlers have ``DRAIN_S`` seconds to finish, and their messages are committed.
"""

from __future__ import annotations

import logging
import os

from keyshard import KeyShardSource, Message

DRAIN_S = 30.0


def handle(message: Message) -> None:
    """Log a message; a real handler writes to a database or calls a service."""
    logging.getLogger("billing").info("%s: %d bytes", message.key, len(message.value or b""))


def main() -> None:
    """Run until SIGTERM, or until the source ends with an error."""
    logging.basicConfig(level=logging.INFO)
    source = KeyShardSource(
        os.environ["BILLING_TOPIC"],
        subscription="billing",
        service_url=os.environ["PULSAR_URL"],
        admin_url=os.environ.get("PULSAR_ADMIN_URL"),
        starting_position="earliest",
        window_bytes_max=128 * 1024 * 1024,
        metrics_port=int(os.environ.get("METRICS_PORT", "9464")),
        metrics_host=os.environ.get("METRICS_HOST", "127.0.0.1"),
    )
    source.run(handle, drain_timeout_s=DRAIN_S, checkpoint=os.environ.get("BILLING_CHECKPOINT"))


if __name__ == "__main__":
    main()
