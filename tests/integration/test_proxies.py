"""Sources, sinks and commands behind a proxy of the environment, on a real broker."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import httpx
import pyarrow as pa
import pytest

from keyshard import Connection, KeyShardSink, KeyShardSource, OAuth2
from keyshard.errors import ConfigError
from keyshard.testing import run_until_idle
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import Workload, create_partitioned_topic, produce
from tests.support.command_line import run
from tests.support.deadlines import deadline
from tests.support.error_text import has_error_form

pytestmark = pytest.mark.broker

SECRET = "s3cr3t-of-nobody"
BEHIND = "http://pulsar.test:8080"
"""An admin interface that only the proxy can reach."""
MESSAGES = 40


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.fixture
def topic(dev_broker: DevBroker, topic_name: str) -> str:
    create_partitioned_topic(dev_broker.admin_url, topic_name, 2)
    produce(Workload(MESSAGES, keys=7), dev_broker.service_url, topic_name)
    return topic_name


@pytest.fixture
def asked(dev_broker: DevBroker, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A proxy of the environment that passes on every request; the URLs that it got."""
    urls: list[str] = []
    broker = httpx.Client(timeout=deadline(20), trust_env=False)

    class Forwarding(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            urls.append(self.path)
            path = urlsplit(self.path)._replace(scheme="", netloc="").geturl()
            length = int(self.headers.get("Content-Length", 0))
            answer = broker.request(
                self.command, f"{dev_broker.admin_url}{path}", content=self.rfile.read(length),
                headers={"Content-Type": self.headers.get("Content-Type", "application/json")},
            )  # fmt: skip
            self.send_response(answer.status_code)
            self.send_header("Content-Type", answer.headers.get("Content-Type", "text/plain"))
            if answer.status_code != httpx.codes.NO_CONTENT:
                self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815 - the names that the server looks for

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with broker, ThreadingHTTPServer(("127.0.0.1", 0), Forwarding) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("HTTP_PROXY", f"ann:{SECRET}@127.0.0.1:{server.server_port}")
        monkeypatch.setenv("NO_PROXY", "a.test,fe80::/10,[::1],10.0.0.0/8")
        yield urls
        server.shutdown()
        thread.join()


def test_the_admin_interface_is_asked_through_a_proxy(
    dev_broker: DevBroker, topic: str, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    source = KeyShardSource(
        topic, subscription="s", service_url=dev_broker.service_url, admin_url=BEHIND,
        starting_position="earliest",
    )  # fmt: skip
    with source.read() as rows:
        assert sum(batch.num_rows for batch in rows) == MESSAGES
    status = run_until_idle(source, lambda _: None)
    assert status["counters"]["completed"] == MESSAGES
    code, out, err = run(
        capsys, "doctor", "--topic", topic, "--subscription", "s",
        "--service-url", dev_broker.service_url, "--admin-url", BEHIND,
    )  # fmt: skip
    assert code == 0, out + err
    assert asked
    assert all(url.startswith(f"{BEHIND}/") for url in asked)


def of_doctor(broker: DevBroker, topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(
        capsys, "doctor", "--topic", topic, "--subscription", "s",
        "--service-url", broker.service_url, "--admin-url", BEHIND,
    )  # fmt: skip
    assert (code, out) == (2, "")
    assert has_error_form(err), err
    raise ConfigError(err)


def of_open(broker: DevBroker, topic: str, _: object) -> None:
    source = KeyShardSource(
        topic, subscription="s", service_url=broker.service_url, admin_url=BEHIND
    )
    source.open()


def of_read(broker: DevBroker, topic: str, _: object) -> None:
    source = KeyShardSource(topic, service_url=broker.service_url, admin_url=BEHIND)
    with source.read() as rows:
        list(rows)


def of_sink(broker: DevBroker, topic: str, _: object) -> None:
    with KeyShardSink(topic, sink_id="s", service_url=broker.service_url, admin_url=BEHIND) as sink:
        sink.write_batch(pa.table({"value": [b"x"]}), 0)


def of_issuer(broker: DevBroker, topic: str, _: object) -> None:
    own = OAuth2(issuer_url="http://issuer.test", client_id="a", client_secret="of-another")
    connection = Connection(broker.service_url, authentication=own)
    KeyShardSource(topic, subscription="s", connection=connection).open()


@pytest.mark.parametrize("use", [of_doctor, of_open, of_read, of_sink, of_issuer])
def test_the_error_of_an_unusable_proxy_names_its_variable_and_no_secret(
    dev_broker: DevBroker,
    topic_name: str,
    use: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    create_partitioned_topic(dev_broker.admin_url, topic_name, 2)
    monkeypatch.setattr("keyshard.broker.auth.http_client.find_spec", lambda _: None)
    for value in ("ftp://{}p:1", "socks5://{}127.0.0.1:1", "http://{}p:port"):
        monkeypatch.setenv("ALL_PROXY", value.format(f"ann:{SECRET}@"))
        with pytest.raises(ConfigError, match=r"(?s)ALL_PROXY is .* to NO_PROXY\.") as caught:
            use(dev_broker, topic_name, capsys)
        assert SECRET not in repr(caught.value)
