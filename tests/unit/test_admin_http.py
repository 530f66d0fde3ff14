"""Requests to the admin interface: credentials and redirects."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from keyshard import Basic, Connection, OAuth2, Token
from keyshard.broker.admin.http import TIMEOUT_S, AdminHttp
from keyshard.broker.admin.rest import PulsarAdmin
from keyshard.broker.auth.credentials import Credentials
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.ledger import Ledger, shown
from keyshard.errors import (
    AdminError,
    AuthenticationError,
    AuthorizationError,
    BrokerError,
    BrokerUnavailableError,
    KeyShardError,
    TlsError,
    TopicNotFoundError,
)
from keyshard.threads import Pool

SECRET = "s3cr3t-of-nobody"
Answer = Callable[[httpx.Request], httpx.Response]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], None]:
    client = httpx.Client

    def use(answer: Answer) -> None:
        def make(**options: object) -> httpx.Client:
            return client(**options | {"transport": httpx.MockTransport(answer)})  # type: ignore[arg-type]

        monkeypatch.setattr(httpx, "Client", make)

    return use


def ask(url: str = "https://a:8443", of: str = "clusters") -> httpx.Response:
    with closing(AdminHttp(Connection(admin_url=url, authentication=Token(SECRET)))) as admin:
        return admin.request("GET", f"/admin/v2/{of}")


def test_a_redirected_request_carries_its_credentials(
    answers: Callable[[Answer], None],
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.headers.get("Authorization") != f"Bearer {SECRET}":
            return httpx.Response(401, text="<html>")
        if request.url.host == "a":
            return httpx.Response(307, headers={"Location": "https://b:8443/admin/v2/clusters"})
        return httpx.Response(200, json=["c"])

    answers(answer)
    assert ask().json() == ["c"]


def test_the_client_and_the_admin_interface_share_the_tokens_of_an_issuer(
    answers: Callable[[Answer], None],
) -> None:
    tokens: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/token":
            tokens.append(f"token-{len(tokens)}")
            return httpx.Response(200, json={"access_token": tokens[-1], "expires_in": 3600})
        if request.url.host == "issuer":
            return httpx.Response(200, json={"token_endpoint": "https://issuer/token"})
        return httpx.Response(200, json=request.headers["Authorization"])

    def connection(client_id: str) -> Connection:
        return Connection(admin_url="https://a:8443", authentication=OAuth2(
            issuer_url="https://issuer", client_id=client_id, client_secret=SECRET
        ))  # fmt: skip

    answers(answer)
    client = Credentials(connection("billing"))
    for _ in range(2):
        assert client.show().data == "token-0"
        with closing(AdminHttp(connection("billing"))) as admin:
            assert admin.request("GET", "/").json() == "Bearer token-0"
    assert Credentials(connection("another")).show().data == "token-1"
    assert tokens == ["token-0", "token-1"]


def test_no_request_is_redirected_without_tls_or_in_circles(
    answers: Callable[[Answer], None],
) -> None:
    answers(lambda _: httpx.Response(307, headers={"Location": "http://b:8080/admin/v2/clusters"}))
    with pytest.raises(TlsError, match="without TLS"):
        ask()
    answers(lambda request: httpx.Response(307, headers={"Location": str(request.url)}))
    with pytest.raises(AdminError, match="redirected too often"):
        ask()


def test_a_name_that_no_url_can_contain_is_refused(answers: Callable[[Answer], None]) -> None:
    answers(lambda _: httpx.Response(200, json=[]))
    with pytest.raises(AdminError, match="URL too long") as caught:
        ask(of="x" * 1_000_000)
    assert len(str(caught.value)) < 2_000


def test_rejected_credentials_and_missing_permissions_are_different_errors(
    answers: Callable[[Answer], None],
) -> None:
    answers(lambda _: httpx.Response(401, text="<html> Authentication required </html>"))
    with pytest.raises(AuthenticationError, match="rejects"):
        ask()
    reason = "Unauthorized to validateTopicOperation for operation [LOOKUP] on topic [t://x]"
    for status in (401, 403):
        answers(lambda _, code=status: httpx.Response(code, json={"reason": reason}))  # type: ignore[misc]
        with pytest.raises(AuthorizationError, match=r"lacks the permission 'consume' on t://x"):
            ask()
    answers(lambda _: httpx.Response(403, json={"reason": f"odd {'x' * 9_000}"}))
    with pytest.raises(AuthorizationError) as caught:
        ask()
    assert len(str(caught.value)) < 2_000


def test_basic_authentication_is_sent_as_a_header(answers: Callable[[Answer], None]) -> None:
    answers(lambda request: httpx.Response(200, json=request.headers["Authorization"]))
    connection = Connection(admin_url="https://a:1", authentication=Basic("ann", "b"))
    with closing(AdminHttp(connection)) as admin:
        assert admin.request("GET", "/x").json() == "Basic YW5uOmI="


@pytest.mark.parametrize(
    ("output", "last", "asked"),
    [
        (
            (200, {"state": "Ready", "ongoingTxnSize": 1, "maxReadPosition": "7:-1"}),
            EntryId(7, -1),
            2,
        ),
        ((200, {"state": "Ready", "ongoingTxnSize": 0, "maxReadPosition": "7:3"}), None, 2),
        ((200, {"state": "NoSnapshot", "ongoingTxnSize": 0}), None, 2),
        (
            (
                503,
                {"reason": "It is not configured with transactionCoordinatorEnabled=true."},
            ),
            None,
            1,
        ),
    ],
)
def test_messages_behind_an_open_transaction_are_reported(
    answers: Callable[[Answer], None],
    output: tuple[int, dict[str, object]],
    last: EntryId | None,
    asked: int,
) -> None:
    paths: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.path)
        return httpx.Response(output[0], json=output[1])

    answers(answer)
    with closing(PulsarAdmin(Connection(admin_url="https://a:8443"))) as admin:
        for _ in range(2):
            where = TopicPartition("persistent://public/default/t", 1)
            assert admin.held_back_behind(where) == last
    name = "/admin/v3/transactions/transactionBufferStats/public/default/t-partition-1"
    assert paths == [name] * asked


@pytest.mark.parametrize(
    "output",
    [
        (404, {"reason": "Topic not found persistent://public/default/t-partition-1"}),
        (200, {"state": "Initializing", "ongoingTxnSize": 0, "maxReadPosition": "7:3"}),
    ],
)
def test_a_broker_that_loads_a_topic_is_asked_again_for_its_transactions(
    answers: Callable[[Answer], None], output: tuple[int, dict[str, object]]
) -> None:
    """A broker reports none until it has read them, and loads no topic for this question."""
    answers(lambda _: httpx.Response(output[0], json=output[1]))
    where = TopicPartition("persistent://public/default/t", 1)
    with (
        closing(PulsarAdmin(Connection(admin_url="https://a:8443"))) as admin,
        pytest.raises(BrokerUnavailableError, match="does not know yet") as caught,
    ):
        admin.held_back_behind(where)
    assert caught.value.retriable


@pytest.mark.parametrize(
    ("code", "reason"),
    [(403, "no"), (401, "Unauthorized to validateTopicOperation for operation [GET_STATS]")],
)
def test_missing_permission_to_ask_for_transactions_is_an_error(
    answers: Callable[[Answer], None], code: int, reason: str
) -> None:
    answers(lambda _: httpx.Response(code, json={"reason": reason}))
    where = TopicPartition("persistent://public/default/t", 1)
    with (
        closing(PulsarAdmin(Connection(admin_url="https://a:8443"))) as admin,
        pytest.raises(AuthorizationError),
    ):
        admin.held_back_behind(where)


def test_entries_after_the_last_one_that_consumers_may_see_are_left_out() -> None:
    ledgers = [Ledger(3, 10, 1_000), Ledger(5, 4, 400), Ledger(7, 2, 200)]
    assert shown(ledgers, None) == tuple(ledgers)
    assert shown(ledgers, EntryId(7, 1)) == tuple(ledgers)
    assert shown(ledgers, EntryId(5, 0)) == (ledgers[0], Ledger(5, 1, 100))
    assert shown(ledgers, EntryId(3, -1)) == (Ledger(3, 0, 0),)


def test_only_an_answer_of_pulsar_counts_as_not_found(answers: Callable[[Answer], None]) -> None:
    topic = "persistent://public/default/t"
    where = TopicPartition(topic, 0)
    # Proxies say it in words of their own, as text, HTML or JSON.
    for said in ("default backend - 404", "<html>404 Not Found</html>", '{"status": 404}'):
        answers(lambda _, said=said: httpx.Response(404, text=said))  # type: ignore[misc]
        with closing(PulsarAdmin(Connection(admin_url="https://a:8443"))) as admin:
            for ask_for in (
                lambda admin=admin: admin.partition_count(topic),
                lambda admin=admin: admin.schema(topic),
                lambda admin=admin: admin.subscriptions(where),
                lambda admin=admin: admin.remove_leftover(where, "s"),
                lambda admin=admin: admin.held_back_behind(where),
            ):
                with pytest.raises(AdminError, match=r"404, .* another program answers"):
                    ask_for()
    answers(lambda _: httpx.Response(404, json={"reason": "Topic not found"}))
    with closing(PulsarAdmin(Connection(admin_url="https://a:8443"))) as admin:
        assert admin.partition_count(topic) is None
        assert admin.schema(topic) is None
        assert admin.remove_leftover(where, "s")


@pytest.mark.parametrize(
    ("status", "said"),
    [
        *((status, "starting") for status in (500, 502, 503, 504)),
        *((status, "Too Many Requests") for status in (408, 429)),
        (412, "Can't find owner for topic persistent://public/default/t"),
        (412, "Failed to find ownership for topic:persistent://public/default/t"),
    ],
)
def test_a_broker_that_cannot_answer_now_may_be_asked_again(
    answers: Callable[[Answer], None], status: int, said: str
) -> None:
    answers(lambda _: httpx.Response(status, json={"reason": said}))
    with (
        closing(PulsarAdmin(Connection(admin_url="https://a:8443"))) as admin,
        pytest.raises(BrokerUnavailableError, match=f"status {status}, {said}") as caught,
    ):
        admin.cluster()
    assert caught.value.retriable
    answers(lambda _: httpx.Response(412, json={"reason": "Topic has active producers"}))
    with (
        closing(PulsarAdmin(Connection(admin_url="https://a:8443"))) as admin,
        pytest.raises(AdminError, match="active producers"),
    ):
        admin.cluster()


@pytest.mark.parametrize(
    ("status", "said"), [(500, "starting"), (412, "Topic has active subscriptions")]
)
def test_a_leftover_that_is_not_deleted_now_belongs_to_nobody_else_yet(
    answers: Callable[[Answer], None], status: int, said: str
) -> None:
    """Issue: an error of the deletion counted as the answer that another client uses the topic."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "DELETE":
            return httpx.Response(status, json={"reason": said})
        return httpx.Response(200, json={"subscriptions": {"s": {"consumers": []}}})

    answers(answer)
    where = TopicPartition("persistent://public/default/t", 0)
    with closing(PulsarAdmin(Connection(admin_url="https://a:8443"))) as admin:
        assert admin.remove_leftover(where, "s") is None


def test_a_system_topic_has_no_transactions(
    answers: Callable[[Answer], None],
) -> None:
    answers(lambda _: httpx.Response(200, content=b""))
    with closing(PulsarAdmin(Connection(admin_url="https://a:8443"))) as admin:
        where = TopicPartition("persistent://public/default/__change_events", 0)
        assert admin.held_back_behind(where) is None


def test_a_partition_that_newer_brokers_deny_is_missing(answers: Callable[[Answer], None]) -> None:
    where = TopicPartition("persistent://public/default/t", 0)
    said = f"Partition metadata not found for the partitioned topic: {where}"
    answers(lambda _: httpx.Response(409, json={"reason": said}))
    with closing(PulsarAdmin(Connection(admin_url="https://a:8443"))) as admin:
        assert admin.subscription(where, "s") is None
        assert admin.ledgers(where) is None
        assert admin.remove_leftover(where, "s") is True
    answers(lambda _: httpx.Response(409, json={"reason": "Topic has active producers"}))
    with (
        closing(PulsarAdmin(Connection(admin_url="https://a:8443"))) as admin,
        pytest.raises(AdminError, match="active producers"),
    ):
        admin.ledgers(where)


@pytest.mark.parametrize(
    "page",
    [
        {"text": "<!DOCTYPE html><p>KEEP OUT</p>"},
        {"text": "KEEP OUT", "headers": {"content-type": "text/html; charset=utf-8"}},
    ],
)
def test_an_error_contains_no_page_of_a_web_server(
    page: dict[str, Any], answers: Callable[[Answer], None]
) -> None:
    answers(lambda _: httpx.Response(500, **page))
    with (
        closing(PulsarAdmin(Connection(admin_url="https://a:8443"))) as admin,
        pytest.raises(
            BrokerUnavailableError, match=r"status 500, Internal Server Error\."
        ) as caught,
    ):
        admin.partition_count("persistent://public/default/t")
    assert "KEEP OUT" not in str(caught.value)


@pytest.mark.parametrize("output", [b"<html>", b"[7]", b"{}", b"null", b"7", b""])
def test_a_foreign_answer_is_an_error_and_no_missing_topic(
    answers: Callable[[Answer], None], output: bytes
) -> None:
    answers(lambda _: httpx.Response(200, content=output))
    where = TopicPartition("persistent://public/default/t", 1)
    with closing(PulsarAdmin(Connection(admin_url="https://a:8443"))) as admin:
        for ask in (
            admin.ledgers,
            admin.held_back_behind,
            lambda where: admin.position_at(where, 5),
            lambda where: admin.partition_count(where.topic),
            lambda where: admin.schema(where.topic),
        ):
            with pytest.raises(AdminError, match="cannot be understood"):
                ask(where)


def test_an_answer_that_never_ends_is_given_up(
    answers: Callable[[Answer], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keyshard.broker.admin.http.ANSWER_S", 0.05)
    answers(lambda _: httpx.Response(200, content=itertools.repeat(b" ")))
    with (
        closing(PulsarAdmin(Connection(admin_url="https://a:8443"))) as admin,
        pytest.raises(BrokerUnavailableError, match="was not complete"),
    ):
        admin.version()


def test_only_the_first_answer_has_to_come_soon(answers: Callable[[Answer], None]) -> None:
    waits: list[float] = []

    def answer(request: httpx.Request) -> httpx.Response:
        waits.append(request.extensions["timeout"]["read"])
        return httpx.Response(200, json=["one"])

    answers(answer)
    with closing(PulsarAdmin(Connection(admin_url="https://a:8443"), first_s=0.5)) as admin:
        admin.cluster()
        admin.cluster()
    assert waits == [0.5, TIMEOUT_S]


@pytest.mark.parametrize("answer", [None, [], "down", 1, {"subscriptions": None}])
def test_invalid_statistics_and_settings_are_a_named_error(
    answers: Callable[[Answer], None], answer: object
) -> None:
    """Issue: a gateway that answered otherwise ended the source by an unexpected error."""
    answers(lambda _request: httpx.Response(200, json=answer))
    with closing(PulsarAdmin(Connection(admin_url="https://a:8443"))) as admin:
        with pytest.raises(AdminError, match="cannot be understood"):
            admin.subscriptions(TopicPartition("persistent://public/default/orders"))
        if not isinstance(answer, (dict, list)):
            with pytest.raises(AdminError, match="cannot be understood"):
                admin.settings()


@pytest.mark.parametrize("status", [200, 401, 404, 500])
@pytest.mark.parametrize(
    "output",
    [
        b"null", b"7", b"[null]", b"[1, \"a\"]", b"[" * 100_000, b"9" * 5_000, b"\xff", b"1e999",
        b'{"partitions": 1e999, "ledgerId": 1e999, "entryId": 1, "type": "A", "version": 1e999}',
        b'{"subscriptions": 3, "ledgers": [{"ledgerId": 1e999}], "own": 1e999}',
        b'{"subscriptions": {"s": 3}}', b'{"subscriptions": {"s": {"consumers": []}}}',
    ],
    ids=lambda output: repr(output[:20]),
)  # fmt: skip
def test_an_answer_of_any_shape_is_understood_or_a_named_error(
    answers: Callable[[Answer], None], output: bytes, status: int
) -> None:
    """Issue: huge numbers, unclosed lists and other values than lists raised raw errors."""
    answers(lambda _: httpx.Response(status, content=output))
    where = TopicPartition("persistent://public/default/t", 1)
    with closing(PulsarAdmin(Connection(admin_url="https://a:8443"))) as admin:
        for ask in (
            admin.version, admin.settings, admin.cluster,
            lambda: admin.namespaces("a"), lambda: admin.topics("a", "b"),
            lambda: admin.partition_count(where.topic), lambda: admin.create(where.topic, 3),
            lambda: admin.created(where), lambda: admin.remove_leftover(where, "s"),
            lambda: admin.subscription(where, "s"),
            lambda: admin.set_property(where, "s", "a", "b"),
            lambda: admin.unacknowledged_limits(where.topic), lambda: admin.ledgers(where),
            lambda: admin.consumer_limits(where.topic),
            lambda: admin.broker_state(where, "s"), lambda: admin.last_written(where),
            lambda: admin.held_back_behind(where), lambda: admin.position_at(where, 5),
            lambda: admin.schema(where.topic),
        ):  # fmt: skip
            with suppress(KeyShardError):
                ask()


@pytest.mark.parametrize(
    ("of_topic", "of_namespace", "of_broker", "limits"),
    [
        ("7", "5", "3", (7, 7)),
        ("", "5", "3", (5, 5)),
        (None, "5", "3", (5, 5)),
        ("0", "5", "3", (0, 0)),
        ("", "", "3", (3, 3)),
        ("", "", None, (0, 0)),
        ("", "", 403, (None, None)),
        (None, "", 403, (None, None)),
        ("0", "", 403, (0, 0)),
        ("", "0", 403, (0, 0)),
    ],
)
def test_limits_of_consumers_are_those_of_the_topic_its_namespace_or_the_broker(
    answers: Callable[[Answer], None], of_topic: str | None, of_namespace: str,
    of_broker: str | int | None, limits: tuple[int | None, int | None],
) -> None:  # fmt: skip
    """Pulsar 5.0.1 answers 204 for a topic without a policy, and 405 if it disables policies.

    Issue: limits that the role may not read in the configuration of the broker were 0, no limit.
    """

    def answer(request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if "/brokers/" in path:
            if isinstance(of_broker, int):
                return httpx.Response(of_broker, json={"reason": "lacks the permission"})
            names = "maxConsumersPerTopic", "maxConsumersPerSubscription"
            settings = {} if of_broker is None else dict.fromkeys(names, of_broker)
            return httpx.Response(200, json=settings)
        found = of_namespace if "/namespaces/" in path else of_topic
        if found is None:
            return httpx.Response(405, json={"reason": "Topic level policies is disabled"})
        return httpx.Response(200 if found else 204, content=found.encode())

    answers(answer)
    with closing(PulsarAdmin(Connection(admin_url="https://a:8443"))) as admin:
        assert admin.consumer_limits("persistent://public/default/t") == limits


def test_a_configuration_that_the_role_may_not_read_is_unknown(
    answers: Callable[[Answer], None],
) -> None:
    answers(lambda _: httpx.Response(403, json={"reason": "lacks the permission"}))
    with closing(PulsarAdmin(Connection(admin_url="https://a:8443"))) as admin:
        assert admin.settings() is None


def test_deduplication_without_a_policy_is_unknown_to_a_role_that_may_not_read_the_configuration(
    answers: Callable[[Answer], None],
) -> None:
    """Issue: a sink was refused, although the broker deduplicates by its configuration."""

    def answer(request: httpx.Request) -> httpx.Response:
        if "/brokers/" in request.url.path:
            return httpx.Response(403, json={"reason": "lacks the permission"})
        return httpx.Response(204 if "/namespaces/" in request.url.path else 405)

    answers(answer)
    with closing(PulsarAdmin(Connection(admin_url="https://a:8443"))) as admin:
        assert admin.deduplicates("persistent://public/default/t") is None


def test_a_role_that_may_not_see_ledger_locations_still_sees_ledgers(
    answers: Callable[[Answer], None],
) -> None:
    stats = {
        "ledgers": [{"ledgerId": 3, "entries": 5, "size": 50, "metadata": "LedgerMetadata{}"}],
        "lastConfirmedEntry": "4:-1",
    }
    queries: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        queries.append(request.url.query.decode())
        reason = "Unauthorized to validateTopicOperation for operation [GET_METADATA]"
        if queries[-1] and len(queries) > 1:
            return httpx.Response(403, json={"reason": reason})
        return httpx.Response(200, json=stats)

    answers(answer)
    where = TopicPartition("persistent://public/default/t", 1)
    with closing(PulsarAdmin(Connection(admin_url="https://a:8443"))) as admin:
        (seen,) = admin.placed_ledgers(where) or ()
        assert (seen.id, seen.placement) == (3, "it is not closed")
        (refused,) = admin.placed_ledgers(where) or ()
    assert (refused.id, refused.entries) == (3, 5)
    assert "its metadata is refused" in str(refused.placement)
    assert queries == ["metadata=true", "metadata=true", ""]


def test_properties_of_the_broker_are_not_sent_back(answers: Callable[[Answer], None]) -> None:
    """The broker keeps them by itself, and answers 500 if a request has one."""
    internal = "#pulsar.internal.delayed.bucket_1"
    sent: list[object] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={internal: "1", "a": "2"})
        sent.append(json.loads(request.content))
        return httpx.Response(204)

    answers(answer)
    with closing(PulsarAdmin(Connection(admin_url="https://a:8443"))) as admin:
        assert admin.set_property(TopicPartition("persistent://t/n/x"), "s", "b", "3")
    assert sent == [{"a": "2", "b": "3"}]


class _Statuses(BaseHTTPRequestHandler):
    """Answers with the status in the path and the port of the client."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = b"%d" % self.client_address[1]
        self.send_response(int(self.path.rpartition("/")[2]))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def statuses() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Statuses) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_connection_ends_with_a_server_error(statuses: str) -> None:
    with closing(AdminHttp(Connection(admin_url=statuses))) as admin:
        asked = (200, 404, 409, 500, 200, 503, 404, 404)
        ports = [admin.request("GET", f"/admin/v2/{status}").text for status in asked]
    assert [port for port, _ in itertools.groupby(ports)] == [ports[0], ports[4], ports[6]]
    assert len(set(ports)) == 3


def test_a_connection_that_ended_is_given_to_no_request_of_another_thread(statuses: str) -> None:
    def ask(number: int) -> int:
        return admin.request("GET", f"/admin/v2/{500 if number % 2 else 200}").status_code

    with closing(AdminHttp(Connection(admin_url=statuses))) as admin, Pool(4, "test-ask") as pool:
        found = list(pool.map(ask, range(600)))
    assert found == [200, 500] * 300


TRACE = (
    "\n --- An unexpected error occurred in the server ---\n\nMessage: the lock is lost\n\n"
    "Stacktrace:\n\njava.lang.RuntimeException: the lock is lost\n\tat org.apache.A(A.java:1)"
)
"""Reason of an error that a broker did not expect."""


@pytest.mark.parametrize(
    ("put", "get", "error", "text"),
    [
        ((500, TRACE), (404, "none"), TopicNotFoundError, "topic://a/b/c does not exist"),
        ((404, "none"), (200, ""), TopicNotFoundError, "topic://a/b/c does not exist"),
        ((500, TRACE), (200, ""), BrokerUnavailableError, "at https://a:8443: the lock is lost."),
        ((429, "slower"), (200, ""), BrokerUnavailableError, "at https://a:8443: slower."),
        ((409, "busy"), (200, ""), AdminError, "at https://a:8443: busy."),
        ((404, None), (404, None), AdminError, "which does not know scalable topics"),
        ((403, "it may not"), (200, ""), AuthorizationError, "it may not"),
    ],
)
def test_a_registration_that_fails_says_why(
    answers: Callable[[Answer], None], put: tuple[int, str | None], get: tuple[int, str | None],
    error: type[BrokerError], text: str,
) -> None:  # fmt: skip
    def answer(request: httpx.Request) -> httpx.Response:
        status, reason = put if request.method == "PUT" else get
        if reason is None:
            return httpx.Response(status, html="<html>no such path</html>")
        return httpx.Response(status, json={"reason": reason})

    answers(answer)
    with (
        closing(PulsarAdmin(Connection(admin_url="https://a:8443"))) as admin,
        pytest.raises(error) as raised,
    ):
        admin.register("topic://a/b/c", "s")
    assert text in raised.value.message
    assert "Stacktrace" not in raised.value.message


def test_an_error_that_the_broker_did_not_expect_is_told_without_its_stack(
    answers: Callable[[Answer], None],
) -> None:
    answers(lambda _: httpx.Response(500, json={"reason": TRACE}))
    with (
        closing(PulsarAdmin(Connection(admin_url="https://a:8443"))) as admin,
        pytest.raises(BrokerUnavailableError, match=r"failed: status 500, the lock is lost\."),
    ):
        admin.cluster()


def test_a_missing_permission_names_a_command_that_grants_it(
    answers: Callable[[Answer], None],
) -> None:
    said = "Unauthorized to validateTopicOperation for operation [SUBSCRIBE] on topic [%s]"
    topic = "topic://a/b/c"
    answers(lambda _: httpx.Response(403, json={"reason": said % topic}))
    with (
        closing(PulsarAdmin(Connection(admin_url="https://a:8443"))) as admin,
        pytest.raises(AuthorizationError, match="'consume' on topic://a/b/c") as raised,
    ):
        admin.register(topic, "s")
    assert "pulsar-admin namespaces grant-permission a/b --role ROLE" in str(raised.value)


@pytest.mark.parametrize(
    ("policy", "setting", "known"),
    [
        ({"retentionTimeInMinutes": 90, "retentionSizeInMB": -1}, "5", 90),
        (None, "5", 5),
        (None, None, None),
    ],
)
def test_the_retention_time_is_that_of_the_namespace_or_the_broker(
    answers: Callable[[Answer], None],
    policy: dict[str, int] | None,
    setting: str | None,
    known: int | None,
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/admin/v2/namespaces/a/b/retention":
            return httpx.Response(200, json=policy) if policy else httpx.Response(200)
        if setting is None:
            return httpx.Response(403, json={"reason": "it may not"})
        return httpx.Response(200, json={"defaultRetentionTimeInMinutes": setting})

    answers(answer)
    with closing(PulsarAdmin(Connection(admin_url="https://a:8443"))) as admin:
        assert admin.retention_min("topic://a/b/c") == known
