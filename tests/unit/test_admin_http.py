"""Requests to the admin interface: who is shown what, also when a broker sends them on."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import closing, suppress

import httpx
import pytest

from keyshard import Basic, Connection, OAuth2, Token
from keyshard.broker.pulsar import admin_http
from keyshard.broker.pulsar.admin import PulsarAdmin
from keyshard.broker.pulsar.admin_http import TIMEOUT_S, AdminHttp
from keyshard.broker.pulsar.credentials import Credentials
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.ledger import Ledger, shown
from keyshard.errors import (
    AdminError,
    AuthenticationError,
    AuthorizationError,
    BrokerUnavailableError,
    KeyShardError,
    TlsError,
)

SECRET = "s3cr3t-of-nobody"
Answer = Callable[[httpx.Request], httpx.Response]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], None]:
    client = httpx.Client

    def use(answer: Answer) -> None:
        def make(**options: object) -> httpx.Client:
            return client(**options, transport=httpx.MockTransport(answer))  # type: ignore[arg-type]

        monkeypatch.setattr(admin_http.httpx, "Client", make)

    return use


def ask(url: str = "https://a:8443", of: str = "clusters") -> httpx.Response:
    with closing(AdminHttp(Connection(admin_url=url, authentication=Token(SECRET)))) as admin:
        return admin.request("GET", f"/admin/v2/{of}")


def test_who_is_sent_on_to_another_broker_says_who_it_is_there_too(
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


def test_nobody_is_sent_on_without_tls_or_in_circles(answers: Callable[[Answer], None]) -> None:
    answers(lambda _: httpx.Response(307, headers={"Location": "http://b:8080/admin/v2/clusters"}))
    with pytest.raises(TlsError, match="without TLS"):
        ask()
    answers(lambda request: httpx.Response(307, headers={"Location": str(request.url)}))
    with pytest.raises(AdminError, match="from broker to broker"):
        ask()


def test_a_name_that_no_url_takes_is_said(answers: Callable[[Answer], None]) -> None:
    answers(lambda _: httpx.Response(200, json=[]))
    with pytest.raises(AdminError, match="URL too long") as caught:
        ask(of="x" * 1_000_000)
    assert len(str(caught.value)) < 2_000


def test_what_is_refused_is_said_by_kind(answers: Callable[[Answer], None]) -> None:
    answers(lambda _: httpx.Response(401, text="<html> Authentication required </html>"))
    with pytest.raises(AuthenticationError, match="does not accept"):
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


def test_basic_is_a_header(answers: Callable[[Answer], None]) -> None:
    answers(lambda request: httpx.Response(200, json=request.headers["Authorization"]))
    connection = Connection(admin_url="https://a:1", authentication=Basic("ann", "b"))
    with closing(AdminHttp(connection)) as admin:
        assert admin.request("GET", "/x").json() == "Basic YW5uOmI="


@pytest.mark.parametrize(
    ("told", "last", "asked"),
    [
        (
            (200, {"state": "Ready", "ongoingTxnSize": 1, "maxReadPosition": "7:-1"}),
            EntryId(7, -1),
            2,
        ),
        ((200, {"state": "Ready", "ongoingTxnSize": 0, "maxReadPosition": "7:3"}), None, 2),
        ((200, {"state": "NoSnapshot", "ongoingTxnSize": 0}), None, 2),
        (
            (401, {"reason": "Unauthorized to validateTopicOperation for operation [GET_STATS]"}),
            None,
            2,
        ),
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
def test_what_an_open_transaction_holds_back_is_told_where_there_are_any(
    answers: Callable[[Answer], None],
    told: tuple[int, dict[str, object]],
    last: EntryId | None,
    asked: int,
) -> None:
    paths: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.path)
        return httpx.Response(told[0], json=told[1])

    answers(answer)
    with closing(PulsarAdmin(Connection(admin_url="https://a:8443"))) as admin:
        for _ in range(2):
            where = TopicPartition("persistent://public/default/t", 1)
            assert admin.held_back_behind(where) == last
    name = "/admin/v3/transactions/transactionBufferStats/public/default/t-partition-1"
    assert paths == [name] * asked


@pytest.mark.parametrize(
    "told",
    [
        (404, {"reason": "Topic not found persistent://public/default/t-partition-1"}),
        (200, {"state": "Initializing", "ongoingTxnSize": 0, "maxReadPosition": "7:3"}),
    ],
)
def test_a_broker_that_loads_a_topic_is_asked_again_for_its_transactions(
    answers: Callable[[Answer], None], told: tuple[int, dict[str, object]]
) -> None:
    """It tells of none until it has read them, and does not load a topic for this question."""
    answers(lambda _: httpx.Response(told[0], json=told[1]))
    where = TopicPartition("persistent://public/default/t", 1)
    with (
        closing(PulsarAdmin(Connection(admin_url="https://a:8443"))) as admin,
        pytest.raises(BrokerUnavailableError, match="does not know yet") as caught,
    ):
        admin.held_back_behind(where)
    assert caught.value.retriable


def test_who_may_not_ask_for_transactions_is_warned(
    answers: Callable[[Answer], None], caplog: pytest.LogCaptureFixture
) -> None:
    answers(lambda _: httpx.Response(403, json={"reason": "no"}))
    where = TopicPartition("persistent://public/default/t", 1)
    with closing(PulsarAdmin(Connection(admin_url="https://a:8443"))) as admin:
        assert admin.held_back_behind(where) is None
    assert "persistent://public/default/t-partition-1 is not known" in caplog.text


def test_what_is_not_shown_is_not_stored_yet() -> None:
    ledgers = [Ledger(3, 10, 1_000), Ledger(5, 4, 400), Ledger(7, 2, 200)]
    assert shown(ledgers, None) == tuple(ledgers)
    assert shown(ledgers, EntryId(7, 1)) == tuple(ledgers)
    assert shown(ledgers, EntryId(5, 0)) == (ledgers[0], Ledger(5, 1, 100))
    assert shown(ledgers, EntryId(3, -1)) == (Ledger(3, 0, 0),)


def test_only_pulsar_says_that_something_is_not_there(answers: Callable[[Answer], None]) -> None:
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
                with pytest.raises(AdminError, match=r"404, .* something else answers"):
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


def test_a_topic_of_pulsars_own_has_nothing_to_say_of_transactions(
    answers: Callable[[Answer], None],
) -> None:
    answers(lambda _: httpx.Response(200, content=b""))
    with closing(PulsarAdmin(Connection(admin_url="https://a:8443"))) as admin:
        where = TopicPartition("persistent://public/default/__change_events", 0)
        assert admin.held_back_behind(where) is None


@pytest.mark.parametrize("told", [b"<html>", b"[7]", b"{}", b"null", b"7", b""])
def test_what_is_no_answer_of_pulsar_is_an_error_and_no_topic_that_is_gone(
    answers: Callable[[Answer], None], told: bytes
) -> None:
    answers(lambda _: httpx.Response(200, content=told))
    where = TopicPartition("persistent://public/default/t", 1)
    with closing(PulsarAdmin(Connection(admin_url="https://a:8443"))) as admin:
        for ask in (
            admin.ledgers,
            admin.held_back_behind,
            lambda where: admin.position_at(where, 5),
            lambda where: admin.partition_count(where.topic),
            lambda where: admin.schema(where.topic),
        ):
            with pytest.raises(AdminError, match="something unexpected"):
                ask(where)


def test_an_answer_that_never_ends_is_given_up(
    answers: Callable[[Answer], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keyshard.broker.pulsar.admin_http.ANSWER_S", 0.05)
    answers(lambda _: httpx.Response(200, content=itertools.repeat(b" ")))
    with (
        closing(PulsarAdmin(Connection(admin_url="https://a:8443"))) as admin,
        pytest.raises(BrokerUnavailableError, match="did not come whole"),
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
def test_statistics_and_settings_that_are_none_are_an_error_by_name(
    answers: Callable[[Answer], None], answer: object
) -> None:
    """Issue: a gateway that answered otherwise ended the source by an unexpected error."""
    answers(lambda _request: httpx.Response(200, json=answer))
    with closing(PulsarAdmin(Connection(admin_url="https://a:8443"))) as admin:
        with pytest.raises(AdminError, match="unexpected"):
            admin.subscriptions(TopicPartition("persistent://public/default/orders"))
        if not isinstance(answer, (dict, list)):
            with pytest.raises(AdminError, match="unexpected"):
                admin.settings()


@pytest.mark.parametrize("status", [200, 401, 404, 500])
@pytest.mark.parametrize(
    "told",
    [
        b"null", b"7", b"[null]", b"[1, \"a\"]", b"[" * 100_000, b"9" * 5_000, b"\xff", b"1e999",
        b'{"partitions": 1e999, "ledgerId": 1e999, "entryId": 1, "type": "A", "version": 1e999}',
        b'{"subscriptions": 3, "ledgers": [{"ledgerId": 1e999}], "own": 1e999}',
        b'{"subscriptions": {"s": 3}}', b'{"subscriptions": {"s": {"consumers": []}}}',
    ],
    ids=lambda told: repr(told[:20]),
)  # fmt: skip
def test_an_answer_of_any_shape_has_a_meaning_or_is_an_error_by_name(
    answers: Callable[[Answer], None], told: bytes, status: int
) -> None:
    """Numbers without end and lists without end were raw errors; so were lists that are none."""
    answers(lambda _: httpx.Response(status, content=told))
    where = TopicPartition("persistent://public/default/t", 1)
    with closing(PulsarAdmin(Connection(admin_url="https://a:8443"))) as admin:
        for ask in (
            admin.version, admin.settings, admin.cluster,
            lambda: admin.namespaces("a"), lambda: admin.topics("a", "b"),
            lambda: admin.partition_count(where.topic), lambda: admin.create(where.topic, 3),
            lambda: admin.created(where), lambda: admin.remove_leftover(where, "s"),
            lambda: admin.subscription(where, "s"), lambda: admin.begins_whole(where, "s"),
            lambda: admin.unacknowledged_limits(where.topic), lambda: admin.ledgers(where),
            lambda: admin.broker_state(where, "s"), lambda: admin.last_written(where),
            lambda: admin.held_back_behind(where), lambda: admin.position_at(where, 5),
            lambda: admin.schema(where.topic),
        ):  # fmt: skip
            with suppress(KeyShardError):
                ask()
