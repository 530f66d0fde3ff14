"""A broker that is not there, or a wrong URL: one error within 5 s at the first start."""

from __future__ import annotations

import re
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from urllib.parse import urlsplit

import pytest

from keyshard import Connection, KeyShardSource
from keyshard.broker.admin.rest import PulsarAdmin
from keyshard.broker.schemas import asked_first
from keyshard.errors import BrokerError, TopicNotFoundError
from keyshard.testing.devbroker import DevBroker
from spark_adapter.data_source import KeyShardDataSource
from tests.support.deadlines import deadline
from tests.support.error_text import has_error_form

FIRST_S = 5.0
"""Longest time that a mistake at the first start may take, seconds."""
MARGIN_S = deadline(2.0)
"""Extra time of a busy machine, seconds."""


@pytest.fixture
def port() -> Iterator[int]:
    """A bound port without a listener."""
    with closing(socket.socket()) as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.fixture
def silent() -> Iterator[int]:
    """A port that takes connections and says nothing."""
    with closing(socket.create_server(("127.0.0.1", 0))) as held:
        yield held.getsockname()[1]


def refused(why: str, **urls: str) -> None:
    """Check that each way to start fails soon, by an error that names the option and the URL."""
    source = KeyShardSource("orders", subscription="billing", **urls)  # type: ignore[arg-type]
    options = {KEYS[field]: url for field, url in urls.items()}
    query = KeyShardDataSource({"topic": "orders", "subscription": "billing", **options})
    check_each((source.open, source.decoder, query.schema), why, **urls)


KEYS = {"service_url": "service.url", "admin_url": "admin.url"}
FRAMES_MAX = 8
"""Most frames of a traceback, with that of the test."""


def check_each(starts: Sequence[Callable[[], object]], why: str, **urls: str) -> None:
    """Do the same as :func:`check_named` for several ways to start, at the same time."""
    with ThreadPoolExecutor(len(starts)) as pool:
        for checked in [pool.submit(check_named, start, why, **urls) for start in starts]:
            checked.result()


def check_named(start: Callable[[], object], why: str, **urls: str) -> None:
    """Check that one way to start fails soon, by an error that names the option and the URL."""
    (field,) = urls
    began = time.monotonic()
    with pytest.raises(BrokerError) as caught:
        start()
    took = time.monotonic() - began
    text = str(caught.value)
    assert has_error_form(text), text
    assert all(host in text for host in urls[field].partition("://")[2].split(",")[-1:])
    assert field in text or KEYS[field] in text
    assert re.search(why, text)
    assert took < FIRST_S + MARGIN_S, f"only after {took:.1f} s"
    error = caught.value
    assert error.__cause__ is None
    assert error.__suppress_context__ or error.__context__ is None
    frames = traceback.extract_tb(error.__traceback__)
    assert len(frames) <= FRAMES_MAX, frames
    assert not [one for one in frames if "site-packages" in one.filename], frames


def test_a_wrong_port_is_named(port: int) -> None:
    refused("refused", service_url=f"pulsar://127.0.0.1:{port}")
    refused("refused", admin_url=f"http://127.0.0.1:{port}")


def test_a_wrong_host_is_named() -> None:
    refused("is unknown", service_url="pulsar://no-such-host.invalid:6650")
    refused("does not answer", admin_url="http://no-such-host.invalid:8080")


def test_a_silent_port_is_named(silent: int) -> None:
    refused("does not answer", service_url=f"pulsar://127.0.0.1:{silent}")
    refused("does not answer", service_url=f"pulsar+ssl://127.0.0.1:{silent}")
    refused("does not answer", admin_url=f"http://127.0.0.1:{silent}")


def test_a_pattern_and_a_catalog_fail_soon_if_the_admin_interface_is_silent(silent: int) -> None:
    """Issue: a pattern of topics, and a catalog, waited for 10 s."""
    url = f"http://127.0.0.1:{silent}"
    query = KeyShardDataSource({"topicsPattern": "o.*", "subscription": "s", "admin.url": url})
    check_each(
        (
            query.schema,
            lambda: asked_first(
                Connection(admin_url=url), lambda admin: admin.namespaces("public")
            ),
        ),
        "does not answer",
        admin_url=url,
    )


def test_a_service_url_with_several_wrong_hosts_is_named(port: int) -> None:
    refused("refused", service_url=f"pulsar://no-such-host.invalid:6650,127.0.0.1:{port}")


@pytest.mark.broker
def test_a_port_or_scheme_of_another_service_is_named(dev_broker: DevBroker) -> None:
    admin_port = urlsplit(dev_broker.admin_url).port
    refused("8080", service_url=f"pulsar://127.0.0.1:{admin_port}")
    refused("pulsar://", service_url=f"pulsar+ssl://127.0.0.1:{dev_broker.port}")
    refused("admin.url", admin_url=f"http://127.0.0.1:{dev_broker.port}")


@pytest.mark.broker
@pytest.mark.parametrize("with_admin", [True, False])
def test_a_typing_error_in_a_topic_is_reported_and_creates_nothing(
    dev_broker: DevBroker, with_admin: bool
) -> None:
    admin = PulsarAdmin(dev_broker.connection)
    before = admin.topics("public", "default")
    source = KeyShardSource(
        "odrers", subscription="keyshard", service_url=dev_broker.service_url,
        admin_url=dev_broker.admin_url if with_admin else None,
    )  # fmt: skip
    for start in (source.open, lambda: source.run(print), lambda: next(source.batches())):
        with pytest.raises(TopicNotFoundError, match="odrers does not exist"):
            start()
    assert admin.topics("public", "default") == before
    admin.close()
