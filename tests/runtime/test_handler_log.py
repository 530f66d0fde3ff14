"""The log of a source that runs a handler."""

from __future__ import annotations

import logging
import re
from typing import Any

import httpx
import pytest
import tenacity

from keyshard import Message, Reject, RetryLater, RetryPolicy
from keyshard.broker.admin.rest import PulsarAdmin
from keyshard.config.connection import Connection
from keyshard.core.lanes.key_queue import KeyQueue, Work
from keyshard.errors import BrokerUnavailableError
from keyshard.handlers.outcomes import AGAIN_S, KINDS_MAX, FailureLog
from tests.helpers import present, wait_until
from tests.support.parking_topic import ParkingTopic

pytestmark = pytest.mark.usefixtures("control_folder")

ONCE = RetryPolicy(wait=tenacity.wait_none(), stop=tenacity.stop_after_attempt(1))
TWICE = RetryPolicy(wait=tenacity.wait_none(), stop=tenacity.stop_after_attempt(2))


def run(parking: ParkingTopic, messages: int, **options: Any) -> None:
    """Run until so many messages are handled or dead-lettered."""

    def resolved() -> bool:
        counters = running.source.status()["counters"]
        return bool(present(counters["completed"]) + present(counters["deadLettered"]) >= messages)

    with parking.run(**options) as running:
        wait_until(resolved)
    assert running.error is None


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]


def test_a_run_logs_its_actions_once_and_not_for_each_message(
    parking: ParkingTopic, caplog: pytest.LogCaptureFixture
) -> None:
    keys = [f"k{number}" for number in range(100)]
    parking.broken = set(keys[:50])
    parking.publish(*keys, *keys)
    with caplog.at_level(logging.INFO):
        run(parking, 200, retry=TWICE)
    output = lines(caplog)
    assert len(output) < 14, "\n".join(output)
    for pattern in (
        r"started: 3 ranges over 2 topic partitions of \S+/orders as subscription 'keyshard'",
        r"started: 4 lanes in each range, 12 concurrent handlers \(threads\), without a checkpoint",
        r"message \S+ of \S+, of key 'k\d+', failed, next attempt in 0.0 s: ValueError: can",
        r"message \S+ of \S+, of key 'k\d+', failed 2 times, and its key is parked: ValueError: c",
        r"stopping: 0 handlers are running, and have 30 s to finish",
        r"drained in \d+.\d s: 100 messages completed since the start, \d+ attempts failed, 100 m",
    ):
        assert sum(bool(re.match(pattern, line)) for line in output) == 1, (pattern, output)
    assert caplog.text.count("Traceback") == 1, "once for each kind of error"
    assert 'raise ValueError(f"cannot handle' in caplog.text


def test_an_option_that_a_checkpoint_makes_void_is_named(
    parking: ParkingTopic, caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    parking.publish("a", "b")
    checkpoint = f"file://{tmp_path}/orders.json"
    with caplog.at_level(logging.INFO):
        run(parking, 2, checkpoint=checkpoint)
        assert "does not apply" not in caplog.text
        parking.publish("a")
        run(parking, 1, checkpoint=checkpoint)
    assert "the starting position 'earliest' is ignored" in caplog.text


def outcome_log() -> tuple[FailureLog, list[float]]:
    now = [0.0]
    return FailureLog(lambda: now[0]), now


def work(number: int) -> Work:
    message = Message.for_test(b"", key=f"k{number}")
    return Work(message, None, KeyQueue(message.key, 0, 0))


def test_a_repeated_kind_is_logged_again_with_its_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log, now = outcome_log()
    with caplog.at_level(logging.INFO):
        for number in range(1_000):
            log.parked(work(number), ValueError("a"), "ValueError: a")
        log.parked(work(0), KeyError("b"), "KeyError: b")
        log.rejected(work(1), Reject("c"), "c")
        log.rejected(work(1), None, "it has no key")
        log.retried(work(2), RetryLater(1.0, "d"), "d", 1.0)
        now[0] = AGAIN_S
        log.parked(work(7), ValueError("a"), "ValueError: a")
        log.dead_lettered(work(8), ValueError("a"), "ValueError: a")
    output = lines(caplog)
    assert len(output) == 7
    assert "999 more were parked since the previous line of this kind" in output[5]
    assert "more were" not in "".join(output[:5])
    tracebacks = [bool(record.exc_info) for record in caplog.records]
    assert tracebacks == [True, True, False, False, False, False, False]


def test_kinds_of_errors_above_the_limit_are_logged_as_one_kind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log, _ = outcome_log()
    with caplog.at_level(logging.INFO):
        for number in range(KINDS_MAX + 100):
            log.parked(work(number), type(f"E{number}", (Exception,), {})(), "new")
    assert len(caplog.records) == KINDS_MAX + 1
    assert len(log._logged_s) == KINDS_MAX + 1


def test_requests_of_keyshard_are_not_logged_by_httpx_but_foreign_ones_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json="4.0.8")

    admin = PulsarAdmin(Connection(admin_url="http://admin:8080"))
    admin._http._client = httpx.Client(transport=httpx.MockTransport(answer))
    with caplog.at_level(logging.INFO), httpx.Client(transport=httpx.MockTransport(answer)) as own:
        assert admin.version() == "4.0.8"
        assert lines(caplog) == []
        own.get("http://shop/")
        assert len(lines(caplog)) == 1
        admin.close()
    with pytest.raises((BrokerUnavailableError, RuntimeError)):
        admin.version()
    with caplog.at_level(logging.INFO), httpx.Client(transport=httpx.MockTransport(answer)) as own:
        own.get("http://shop/")
        assert len(lines(caplog)) == 2, "also after a request of ours has failed"
