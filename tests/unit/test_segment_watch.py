"""The sessions that report scalable topics and their segments, with scripted brokers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, ClassVar

import pytest

from keyshard.broker.wire import connection_pool
from keyshard.broker.wire.broker import WireBroker
from keyshard.broker.wire.frames import api
from keyshard.config.connection import Connection
from keyshard.core.topic_segments import SegmentGraph, TopicSegment
from keyshard.errors import (
    AuthenticationError,
    AuthorizationError,
    BrokerError,
    BrokerUnavailableError,
    ConfigError,
    TopicNotFoundError,
)
from tests.helpers import wait_until
from tests.support.frame_broker.server import FrameServer, SocketSession
from tests.support.frame_broker.session import framed_fields

TOPIC = "topic://public/default/orders"
KNOWS_SEGMENTS = b"\x40\x01"
"""The eighth feature flag."""
Answer = Callable[[Any, Any], None]


def segment(number: int, first: int, last: int, **others: Any) -> Any:
    return api.SegmentInfo(
        segment_id=number, hash_start=first, hash_end=last, **({"state": 0} | others)
    )


def report(session: Any, asked: Any, epoch: int, *segments: Any) -> None:
    graph = api.SegmentGraph(epoch=epoch, segments=segments)
    session.send(
        "scalable_topic_update", api.ScalableTopicUpdate(session_id=asked.session_id, graph=graph)
    )


def refuse(code: int, text: bytes = b"it says no") -> Answer:
    def answer(session: Any, asked: Any) -> None:
        session.send("scalable_topic_update", api.ScalableTopicUpdate(
            session_id=asked.session_id, error=code, message=text
        ))  # fmt: skip

    return answer


class Session(SocketSession):
    """A session that answers the opening of a watch by a script."""

    flags: ClassVar[bytes] = KNOWS_SEGMENTS
    answer: ClassVar[Answer] = staticmethod(lambda *_: None)
    asked: ClassVar[list[Any]] = []
    """Commands that open watches, and the ids of those that close them."""

    def _connect(self, _: Any) -> None:
        self.put(framed_fields(3, {1: b"test", 2: 21, 3: 5 << 20, 4: self.flags}))

    def _scalable_topic_lookup(self, asked: Any) -> None:
        self.asked.append(asked)
        type(self).answer(self, asked)

    def _watch_scalable_topics(self, asked: Any) -> None:
        self.asked.append(asked)
        type(self).answer(self, asked)

    def _scalable_topic_close(self, asked: Any) -> None:
        self.asked.append(asked.session_id)

    def _watch_scalable_topics_close(self, asked: Any) -> None:
        self.asked.append(asked.watch_id)


def report_topics(session: Any, asked: Any, **event: Any) -> None:
    update = api.WatchScalableTopicsUpdate(watch_id=asked.watch_id, **event)
    session.send("watch_scalable_topics_update", update)


@contextmanager
def broker(answer: Answer, flags: bytes = KNOWS_SEGMENTS) -> Iterator[tuple[WireBroker, Any]]:
    """A client of a broker that answers the opening of a watch as given."""

    class Scripted(Session):
        pass

    Scripted.flags, Scripted.answer, Scripted.asked = flags, staticmethod(answer), []

    class Server(FrameServer):
        session = Scripted

    with closing(Server()) as server:
        connection = Connection(server.url, operation_timeout_ms=1_000)
        with closing(WireBroker(connection)) as client:
            yield client, Scripted.asked


def test_the_first_report_is_the_graph_and_later_ones_replace_it() -> None:
    sessions: list[Any] = []

    def answer(session: Any, asked: Any) -> None:
        sessions.append(session)
        report(session, asked, 4, segment(7, 0, 65535, created_at_ms=5, parent_ids=[1]))

    reports: list[None] = []
    with broker(answer) as (client, asked):
        watch = client.watch_segments(TOPIC, lambda: reports.append(None))
        assert watch.graph == SegmentGraph(
            TOPIC,
            4,
            {7: TopicSegment(7, 0, 65535, is_sealed=False, parents=frozenset({1}), created_ms=5)},
        )
        assert watch.graph.parents == {}, "the parent is deleted"
        assert (asked[0].topic, asked[0].create_if_missing) == (TOPIC.encode(), False)
        report(sessions[0], asked[0], 4, segment(8, 0, 65535))
        report(sessions[0], asked[0], 3, segment(9, 0, 65535))
        report(sessions[0], asked[0], 5, segment(7, 0, 65535, state=1), segment(10, 0, 65535))
        wait_until(lambda: watch.graph.epoch == 5)
        assert set(watch.graph.segments) == {7, 10}, "older reports change nothing"
        assert watch.graph.segments[7].is_sealed
        other = api.ScalableTopicLookup(session_id=asked[0].session_id + 1, topic=b"t")
        report(sessions[0], other, 6, segment(11, 0, 65535))
        wait_until(lambda: len(reports) == 3)
        assert watch.graph.epoch == 5, "that is another session"
        watch.close()
        assert not watch.is_open


@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        (11, BrokerUnavailableError, "it says no"),
        (4, AuthorizationError, "it says no"),
        (1, BrokerUnavailableError, "metadata store"),
        (99, BrokerError, "it says no"),
    ],
)
def test_a_refused_lookup_is_an_error_that_names_topic_and_reason(
    code: int, kind: type[BrokerError], text: str
) -> None:
    with broker(refuse(code)) as (client, _), pytest.raises(kind, match=text) as caught:
        client.watch_segments(TOPIC, lambda: None)
    assert TOPIC in str(caught.value)


def test_only_the_text_of_a_missing_topic_says_that_it_is_missing() -> None:
    absent = refuse(11, b"java.lang.IllegalStateException: Scalable topic not found: topic://a/b/c")
    with (
        broker(absent) as (client, _),
        pytest.raises(TopicNotFoundError, match="scalable-topics create"),
    ):
        client.watch_segments(TOPIC, lambda: None)


def test_a_broker_without_scalable_topics_is_not_asked() -> None:
    with broker(refuse(11), flags=b"") as (client, asked):
        with pytest.raises(ConfigError, match="does not know scalable topics"):
            client.watch_segments(TOPIC, lambda: None)
        assert asked == []


def test_a_broker_that_does_not_answer_is_given_up() -> None:
    with (
        broker(lambda *_: None) as (client, _),
        pytest.raises(BrokerUnavailableError, match="did not report"),
    ):
        client.watch_segments(TOPIC, lambda: None)


def test_a_connection_that_ends_instead_of_an_answer_is_an_error() -> None:
    with (
        broker(lambda session, _: session.cut()) as (client, _),
        pytest.raises(BrokerUnavailableError),
    ):
        client.watch_segments(TOPIC, lambda: None)


@pytest.mark.parametrize("ends", ["error", "nothing", "cut"])
def test_a_watch_ends_with_its_session(ends: str) -> None:
    sessions: list[Any] = []

    def answer(session: Any, asked: Any) -> None:
        sessions.append(session)
        report(session, asked, 1, segment(0, 0, 65535))

    reports: list[None] = []
    with broker(answer) as (client, asked):
        watch = client.watch_segments(TOPIC, lambda: reports.append(None))
        assert watch.is_open
        if ends == "error":
            refuse(11)(sessions[0], asked[0])
        elif ends == "nothing":
            sessions[0].send(
                "scalable_topic_update", api.ScalableTopicUpdate(session_id=asked[0].session_id)
            )
        else:
            sessions[0].cut()
        wait_until(lambda: not watch.is_open)
        if ends != "cut":
            wait_until(lambda: reports)
        assert set(watch.graph.segments) == {0}, "what was reported stays"


def listed(sessions: list[Any]) -> Answer:
    """Answer the watch of a namespace with two topics, and note the session."""

    def answer(session: Any, asked: Any) -> None:
        sessions.append(session)
        report_topics(session, asked, snapshot=api.ScalableTopicsSnapshot(topics=[b"a", b"b"]))

    return answer


def test_created_and_deleted_topics_of_a_namespace_are_reported_by_name() -> None:
    sessions, reported = list[Any](), list[str]()
    with broker(listed(sessions)) as (client, asked):
        watch = client.watch_topics("topic://public/default/or", reported.extend)
        assert watch is not None
        assert asked[0].namespace == b"public/default"
        diff = api.ScalableTopicsDiff(
            added=[TOPIC.encode(), b"topic://public/default/other"],
            removed=[b"topic://public/default/orchids"],
        )
        report_topics(sessions[0], asked[0], diff=diff)
        wait_until(lambda: reported == [TOPIC, "topic://public/default/orchids"])
        watch.close()
        assert not watch.is_open
        wait_until(lambda: asked[1:] == [asked[0].watch_id])


def test_a_refused_watch_of_a_namespace_is_an_error_and_a_broken_one_is_over() -> None:
    def refused(session: Any, asked: Any) -> None:
        report_topics(session, asked, error=4, message=b"it says no")

    with broker(refused) as (client, _), pytest.raises(AuthorizationError, match="it says no"):
        client.watch_topics("topic://public/default/", lambda _: None)
    sessions: list[Any] = []
    with broker(listed(sessions)) as (client, asked):
        watch = client.watch_topics("topic://public/default/", lambda _: None)
        assert watch is not None
        refused(sessions[0], asked[0])
        wait_until(lambda: not watch.is_open)


def test_a_broker_without_scalable_topics_watches_no_namespace() -> None:
    with broker(listed([]), flags=b"") as (client, asked):
        assert client.watch_topics("topic://public/default/", lambda _: None) is None
        assert asked == []


def test_all_watches_share_a_connection_until_it_is_lost() -> None:
    sessions: list[Any] = []

    def answer(session: Any, asked: Any) -> None:
        sessions.append(session)
        report(session, asked, 1, segment(0, 0, 65535))

    with broker(answer) as (client, asked):
        first, second = (client.watch_segments(TOPIC, lambda: None) for _ in range(2))
        assert sessions[0] is sessions[1]
        first.close()
        wait_until(lambda: asked[2:] == [asked[0].session_id])
        assert second.is_open
        sessions[0].cut()
        wait_until(lambda: not second.is_open)
        assert client.watch_segments(TOPIC, lambda: None).is_open
        assert sessions[2] is not sessions[0]


@pytest.mark.parametrize("prefix", [None, "topic://public/default/"])
def test_a_watch_that_finds_expired_credentials_shows_new_ones_next(
    monkeypatch: pytest.MonkeyPatch, prefix: str | None
) -> None:
    """A proxy refuses so, and leaves the connection open."""
    sessions: list[Any] = []

    def answer(session: Any, asked: Any) -> None:
        sessions.append(session)
        if session is not sessions[0] and prefix is None:
            report(session, asked, 1, segment(0, 0, 65535))
        elif session is not sessions[0]:
            report_topics(session, asked, snapshot=api.ScalableTopicsSnapshot(topics=[]))
        elif prefix is None:
            refuse(3, b"Token expired")(session, asked)
        else:
            report_topics(session, asked, error=3, message=b"Token expired")

    def watch() -> Any:
        if prefix is None:
            return client.watch_segments(TOPIC, lambda: None)
        return client.watch_topics(prefix, lambda _: None)

    with broker(answer) as (client, _):
        with pytest.raises(AuthenticationError, match="Token expired"):
            watch()
        with pytest.raises(AuthenticationError, match="Token expired"):
            watch()
        assert len(set(map(id, sessions))) == 1, "fresh credentials are not shown again at once"
        monkeypatch.setattr(connection_pool, "RETIRE_AGE_S", 0.0)
        with pytest.raises(AuthenticationError, match="Token expired"):
            watch()
        assert watch().is_open


def test_a_hash_that_no_open_segment_has_is_an_error() -> None:
    graph = SegmentGraph(TOPIC, 0, {0: TopicSegment(0, 0, 65535, is_sealed=False)})
    assert graph.open_segment(65535).number == 0
    with pytest.raises(ValueError, match="no open segment"):
        SegmentGraph(TOPIC, 0, {}).open_segment(1)
