"""A broker and its producers."""

from __future__ import annotations

import os
import random
import signal
import time
from base64 import b64encode
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from keyshard.core.protobuf import Value
from keyshard.testing.devbroker import DevBroker
from tests.contract.raw_protocol import RawConnection
from tests.stored_entries import LZ4, NONE, ZSTD, batch_payload, keys_of, packed
from tests.streams.values import Schema
from tests.support.deadlines import deadline
from tests.support.tested_pulsar import PULSAR

ASK_S = deadline(60)
_POLL_S = 0.2


class Broker:
    """One broker that lets every schema follow every other."""

    def __init__(self, directory: Path) -> None:
        self._broker = DevBroker(PULSAR, data_dir=directory)

    def __enter__(self) -> Broker:
        self._broker.__enter__()
        self.ask(
            "PUT", "namespaces/public/default/schemaCompatibilityStrategy",
            json="ALWAYS_COMPATIBLE",
        )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)
        self._broker.kill()

    @property
    def service_url(self) -> str:
        """URL of the binary protocol."""
        return self._broker.service_url

    @property
    def admin_url(self) -> str:
        """URL of the admin interface."""
        return self._broker.admin_url

    def restart(self) -> None:
        """Kill it, and start it on the same data."""
        self._broker.kill()
        self._broker.start(150.0)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of its processes."""
        group = self._broker.pid
        if group is not None:
            os.killpg(group, number)

    def ask(self, method: str, path: str, *, missing: bool = False, **how: Any) -> httpx.Response:
        """A request of an administrator, made again while the broker is busy.

        Args:
            missing: Whether 404 is an answer.

        Raises:
            TimeoutError: It was refused until the deadline.
        """
        end = time.monotonic() + ASK_S
        while True:
            output = ""
            try:
                url = f"{self.admin_url}/admin/v2/{path}"
                answer = httpx.request(method, url, timeout=ASK_S, trust_env=False, **how)
                if answer.is_success or (missing and answer.status_code == 404):
                    return answer
                output = f"{answer.status_code} {answer.text[:200]}"
            except httpx.HTTPError as exc:
                output = str(exc)
            if time.monotonic() > end:
                raise TimeoutError(f"{method} {path}: {output}")
            time.sleep(_POLL_S)

    def register(self, topic: str, schema: Schema) -> int:
        """Register the next version of a schema; its number."""
        path = f"schemas/public/default/{topic}/schema"
        answer = self.ask("POST", path, json=schema.body()).json()["version"]
        return int(answer["version"] if isinstance(answer, dict) else answer)

    def create(self, topic: str, partitions: int) -> None:
        """Create a topic; 0: without partitions. A reconnect may be faster."""
        path = f"persistent/public/default/{topic}"
        end = time.monotonic() + ASK_S
        while True:
            url = f"{self.admin_url}/admin/v2/{path}"
            how: dict[str, Any] = {"json": partitions} if partitions else {}
            answer = httpx.put(f"{url}/partitions" if partitions else url, timeout=ASK_S, **how)
            if answer.is_success:
                return
            there = self.ask("GET", f"{path}/partitions", missing=True).json().get("partitions")
            if there == partitions:
                return
            if time.monotonic() > end:
                raise TimeoutError(f"{topic} cannot be created: {answer.text[:200]}")
            for name in [f"{topic}-partition-{one}" for one in range(partitions)] or [topic]:
                httpx.delete(
                    f"{self.admin_url}/admin/v2/persistent/public/default/{name}",
                    params={"force": True}, timeout=ASK_S,
                )  # fmt: skip

    def delete(self, topic: str, partitions: int) -> None:
        """Delete a topic by force."""
        path = f"persistent/public/default/{topic}{'/partitions' if partitions else ''}"
        self.ask("DELETE", path, missing=True, params={"force": True})

    def grow(self, topic: str, partitions: int) -> None:
        """Give a topic more partitions."""
        self.ask("POST", f"persistent/public/default/{topic}/partitions", json=partitions)

    def unload(self) -> None:
        """Unload the namespace."""
        self.ask("PUT", "namespaces/public/default/unload")

    def backlog(self, name: str, subscription: str) -> int:
        """Entries of a topic partition that are not acknowledged; -1: no such subscription."""
        path = f"persistent/public/default/{name}/stats?getPreciseBacklog=true"
        found = self.ask("GET", path, missing=True).json().get("subscriptions", {})
        return int(found[subscription]["msgBacklog"]) if subscription in found else -1

    def publish(self, name: str, entries: Sequence[tuple[dict[int, Value], bytes]]) -> int:
        """Publish producer batches in a topic partition; how many the broker confirmed."""
        done = 0
        port = urlsplit(self.service_url).port
        assert port is not None
        self.ask("GET", f"persistent/public/default/{name}/stats", missing=True)
        try:
            httpx.get(
                f"{self.admin_url}/lookup/v2/topic/persistent/public/default/{name}", timeout=ASK_S
            )
            with RawConnection("127.0.0.1", port) as connection:
                full = f"persistent://public/default/{name}"
                for one in entries:
                    connection.publish(full, [one])
                    done += 1
        except (OSError, AssertionError, httpx.HTTPError):
            pass
        return done


def entry_of(
    messages: Sequence[tuple[int, bytes | None]],
    key: str | bytes | None,
    ordering_key: str | None,
    version: int | None,
    drawn: random.Random,
) -> tuple[dict[int, Value], bytes]:
    """Metadata and payload of a producer batch of one key.

    Args:
        messages: Number and value of each.
        key: Of all.
        ordering_key: Of all.
        version: Of the schema, as the broker numbers it; ``None``: it is not said.
        drawn: Decides how it is packed.
    """
    keys: dict[str, Any] = {
        "key": key if isinstance(key, str) else None,
        "key_bytes": key if isinstance(key, bytes) else None,
        "ordering_key": ordering_key,
    }
    output = [
        keys | {"value": value, "properties": {"n": str(number)}, "event_ms": number + 1,
                "sequence_id": number}
        for number, value in messages
    ]  # fmt: skip
    payload = batch_payload(output)
    compression = drawn.choice((NONE, LZ4, ZSTD))
    metadata: dict[int, Value] = keys_of(output[0], 6, 17, 18)
    metadata |= {8: compression, 9: len(payload), 11: len(messages)}
    if version is not None:
        metadata[16] = version.to_bytes(8, "big")
    return metadata, packed(payload, compression)


def text_of(key: str | bytes | None) -> str | None:
    """A key as its column has it."""
    return b64encode(key).decode() if isinstance(key, bytes) else key
