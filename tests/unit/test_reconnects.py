"""Consumers that lost their broker: refusals, silent brokers, and delays of reconnects."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from tempfile import TemporaryFile
from typing import Any

import pytest

from keyshard.broker import preflight, retry
from keyshard.broker.auth.credentials import Credentials
from keyshard.broker.port import StartPosition, SubscriptionSpec
from keyshard.broker.retry import Retrier, Steps
from keyshard.broker.wire import ack_grouping, connection_pool
from keyshard.broker.wire import broker as brokering
from keyshard.broker.wire.broker import WireBroker
from keyshard.broker.wire.connect import Address
from keyshard.broker.wire.consumer import WireConsumer
from keyshard.broker.wire.frames import api
from keyshard.broker.wire.keep_alive import Act, KeepAlive
from keyshard.config.connection import Connection, OAuth2, Token
from keyshard.core import refusal_timer
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.ring.hash_range import HashRange, split_ring
from keyshard.errors import (
    AuthenticationError,
    AuthorizationError,
    BrokerUnavailableError,
    ConfigError,
    KeyShardError,
    ThreadStartError,
)
from keyshard.threads import owned_by
from tests.helpers import DEADLINE_S, wait_until
from tests.refusals.broker import SAID, Cluster, Session
from tests.support.deadlines import deadline
from tests.support.frame_broker.session import framed

TOPIC = TopicPartition("persistent://public/default/t")
WORDS = SAID.decode()


def consumer_of(
    broker: WireBroker, where: TopicPartition = TOPIC, part: HashRange | None = None
) -> WireConsumer:
    return broker.subscribe(
        SubscriptionSpec(
            where, "s", part or split_ring(1)[0], consumer_name="c", receiver_queue_size=10
        ),
        StartPosition.EARLIEST,
    )


def error_of(consumer: WireConsumer) -> KeyShardError | None:
    try:
        consumer.receive(10)
    except KeyShardError as exc:
        return exc
    return None


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("request_name", ["connect", "lookup", "subscribe"])
@pytest.mark.parametrize("code", [3, 4, 12, 18, 22])
def test_a_permanent_refusal_ends_a_consumer_by_name(
    cluster: Cluster, connect: Callable[..., WireBroker], request_name: str, code: int
) -> None:
    """1. A consumer is received from. 2. Its permission is revoked. 3. Its connection is lost."""
    broker = cluster.broker()
    consumer = consumer_of(connect(broker))
    rung = threading.Event()
    consumer.when_ready(rung.set)
    broker.refuses(request_name, code)
    broker.cut_all()
    if request_name == "connect" and code not in (3, 4):
        wait_until(lambda: WORDS in consumer.problem())
        broker.is_well()
        wait_until(consumer.is_connected)
        return
    assert rung.wait(DEADLINE_S), "its receive thread hears of it"
    error = error_of(consumer)
    assert error is not None
    assert not error.retriable
    lacks = AuthenticationError if request_name == "connect" else AuthorizationError
    known = {3: AuthenticationError, 4: lacks}
    assert isinstance(error, known.get(code, KeyShardError))


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("code", [0, 1, 2, 5, 6, 11, 14, 19])
def test_a_passing_refusal_is_reported_in_the_words_of_the_broker(
    cluster: Cluster, connect: Callable[..., WireBroker], code: int
) -> None:
    broker = cluster.broker()
    consumer = consumer_of(connect(broker))
    broker.refuses("subscribe", code)
    broker.cut_all()
    words = "does not exist" if code == 11 else WORDS
    wait_until(lambda: words in consumer.problem())
    time.sleep(0.5)
    assert error_of(consumer) is None, "it is asked again"
    broker.is_well()
    wait_until(consumer.is_connected)
    assert consumer.problem() == ""


@pytest.mark.usefixtures("hurried")
def test_a_token_that_was_renewed_is_shown_before_a_refusal_ends_anything(
    cluster: Cluster,
    connect: Callable[..., WireBroker],
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1. A token expires. 2. The broker refuses it a few times. 3. An operator writes a new one."""
    monkeypatch.setattr(refusal_timer, "UNAUTHENTICATED_S", DEADLINE_S)
    broker, path = cluster.broker(), tmp_path / "token"
    path.write_text("old")
    shown: list[bytes] = []

    def script(session: Session, name: str, command: Any) -> bool:
        if name != "connect":
            return False
        shown.append(command.auth_data)
        if expired and command.auth_data == b"old":
            session.refuse_command(name, command, 3)
            return True
        return False

    expired = False
    broker.script = script
    consumer = consumer_of(connect(broker, authentication=Token(file=path)))
    expired = True
    broker.cut_all()
    wait_until(lambda: len(shown) >= 4)
    assert WORDS in consumer.problem()
    path.write_text("new")
    wait_until(consumer.is_connected)
    assert error_of(consumer) is None


@pytest.mark.parametrize("frozen_consumers", [12, 48])
def test_a_frozen_broker_does_not_delay_reconnects_to_a_healthy_one(
    cluster: Cluster,
    connect: Callable[..., WireBroker],
    monkeypatch: pytest.MonkeyPatch,
    frozen_consumers: int,
) -> None:
    """1. Two brokers have topics. 2. One freezes, its consumers lose it. 3. The other restarts."""
    monkeypatch.setattr(retry, "LONGEST_WAIT_S", 0.2)
    healthy, frozen = cluster.broker(), cluster.broker()
    cluster.owner_of = lambda topic: int("frozen" in topic)
    broker = connect(healthy, operation_timeout_ms=90_000, connection_timeout_ms=90_000)
    parts = split_ring(frozen_consumers)
    held = [
        consumer_of(broker, TopicPartition("persistent://public/default/frozen"), part)
        for part in parts
    ]
    free = [consumer_of(broker, TOPIC, part) for part in split_ring(4)]
    frozen.freeze()
    frozen.cut_all()
    wait_until(lambda: not any(one.is_connected() for one in held))
    time.sleep(0.3)
    healthy.cut_all()
    # Before the first attempt on the frozen one ends.
    wait_until(lambda: all(one.is_connected() for one in free))
    cluster.owner_of = lambda _: 0
    frozen.close()
    wait_until(lambda: all(one.is_connected() for one in held))


@pytest.mark.usefixtures("hurried")
def test_a_broker_that_leaves_a_ping_unanswered_is_named_and_its_connection_stays(
    cluster: Cluster, connect: Callable[..., WireBroker]
) -> None:
    """The broker freezes within a frame. Later it sends the rest and answers."""
    broker = cluster.broker()
    answers = threading.Event()
    answers.set()
    # A frozen broker drops the answer that it is about to send, and gets no other ping.
    broker.script = lambda _, name, __: name == "ping" and not answers.wait(DEADLINE_S)
    consumer = consumer_of(connect(broker))
    wait_until(lambda: broker.asked.count("ping") >= 2)
    assert consumer.problem() == ""
    frame = framed("success", api.Success(request_id=0))
    (session,) = broker.sessions
    with cluster.lock:
        answers.clear()
        session.put(frame[:7])
    wait_until(lambda: broker.host in consumer.problem())
    assert "has not answered a ping" in consumer.problem()
    assert consumer.is_connected()
    assert consumer.losses == 0
    session.put(frame[7:])
    answers.set()
    wait_until(lambda: consumer.problem() == "")
    assert consumer.losses == 0


def test_silence_is_judged_in_steps() -> None:
    alive = KeepAlive(0.0)
    assert alive.look(2.9) is Act.NOTHING
    assert alive.due_s() == 3.0
    assert alive.look(3.0) is Act.PING
    assert alive.look(7.9) is Act.NOTHING
    assert alive.due_s() == 8.0
    assert alive.look(8.0) is Act.UNRESPONSIVE
    assert alive.look(9.0) is Act.NOTHING
    assert not alive.responds
    alive.received(20.0)
    assert alive.responds
    assert alive.look(80.0) is Act.GIVE_UP


@pytest.mark.usefixtures("hurried")
def test_refused_acknowledgements_are_asked_again_in_small_requests(
    cluster: Cluster, connect: Callable[..., WireBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ack_grouping, "WAITING_MAX", 20_000)
    broker, sizes = cluster.broker(), list[int]()
    consumer = consumer_of(connect(broker))

    def script(session: Session, name: str, command: Any) -> bool:
        if name != "ack":
            return False
        sizes.append(len(command.message_id))
        session.refuse_command(name, command, 2)
        return True

    broker.script = script

    def acknowledge() -> None:
        for number in range(40):
            consumer.acknowledge([EntryId(7, 1_000 * number + i) for i in range(1_000)])
            wait_until(consumer.problem)

    with pytest.raises(BrokerUnavailableError) as raised:
        acknowledge()
    assert WORDS in str(raised.value)
    assert "Check the load of the broker" not in str(raised.value)
    assert WORDS in consumer.problem()
    asked = len(sizes)
    wait_until(lambda: len(sizes) > asked + 3)
    assert max(sizes[asked:]) <= ack_grouping.REFUSED_AT_ONCE
    broker.is_well()
    wait_until(lambda: len(cluster.acknowledged()) >= 20_000)
    assert consumer.problem() == ""


@pytest.mark.usefixtures("hurried")
def test_acknowledgements_that_are_refused_for_good_end_a_consumer_by_name(
    cluster: Cluster, connect: Callable[..., WireBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(brokering, "CONFIRM_S", 0.05)  # Closing waits for a receipt in vain.
    broker = cluster.broker()
    consumer = consumer_of(connect(broker))
    broker.refuses("ack", 4)
    consumer.acknowledge([EntryId(7, 1)])
    wait_until(lambda: isinstance(error_of(consumer), AuthorizationError))


def test_a_forked_child_leaves_connections_to_its_parent(
    cluster: Cluster, connect: Callable[..., WireBroker]
) -> None:
    """1. A process forks while it consumes. 2. Its child ends. 3. The parent closes, then."""
    broker = cluster.broker()
    consumer = consumer_of(connect(broker))
    release, hold = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            gc.collect()
            os.close(hold)
            os.read(release, 1)
        finally:
            os._exit(0)
    cluster.publish(1)
    wait_until(lambda: consumer.receive(10))
    consumer._at.close()  # type: ignore[union-attr]
    wait_until(lambda: consumer.losses)
    wait_until(consumer.is_connected)  # its range is free, though the child is alive
    os.close(hold)
    os.waitpid(pid, 0)
    os.close(release)


def test_a_forked_child_has_the_files_that_were_opened_after_a_connection_ended(
    cluster: Cluster, connect: Callable[..., WireBroker]
) -> None:
    """1. A connection ends. 2. Files take its numbers. 3. The process forks, as Ray does."""
    client = connect(cluster.broker())
    ended = consumer_of(client)._at
    client.close()
    ended.join(DEADLINE_S)  # type: ignore[union-attr]
    with ExitStack() as opened:
        files = [opened.enter_context(TemporaryFile()) for _ in range(16)]
        pid = os.fork()
        if not pid:
            lost = 16
            with suppress(BaseException):
                lost = sum(is_closed(file.fileno()) for file in files)
            os._exit(lost)
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def is_closed(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return True
    return False


@pytest.mark.parametrize("host", ["", "a..b", "[::1", "[zz]", "a]b", ":80"])
def test_an_invalid_host_is_named_without_its_user(host: str) -> None:
    for urls in (
        (f"pulsar://me:s3cr3t-of-mine@{host}",),
        ("pulsar://localhost:6650", f"http://me:s3cr3t-of-mine@{host}"),
    ):
        with pytest.raises(ConfigError) as caught:
            Connection(*urls)
        assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize(
    "host", ["a" * 70, "a..b", "[::1", "::1", "[zz]", ".", "a]b", "h:1,a..b", ".".join(["a"] * 200)]
)
def test_an_invalid_host_is_an_error_of_the_option(host: str) -> None:
    with pytest.raises(ConfigError, match="service_url"):
        Connection(f"pulsar://{host}:6650")
    if "," not in host:
        with pytest.raises(ConfigError, match="admin_url"):
            Connection("pulsar://h", f"http://{host}:8080")
    with pytest.raises(ConfigError, match="issuer_url"):
        OAuth2(issuer_url="https://[::1", client_id="a", client_secret="b")


@pytest.mark.parametrize("host", ["[::1]", "a" * 63, "broker.", "127.0.0.1", "a_b", "käse.de"])
def test_a_host_that_may_be_valid_is_accepted(host: str) -> None:
    assert Connection(f"pulsar://{host}:6650").hosts == [f"{host}:6650"]


def test_attempts_at_one_resource_do_not_hold_up_those_at_another() -> None:
    made, release, done = Retrier(lane_threads_max=2), threading.Event(), threading.Event()

    def stuck() -> Steps:
        yield "frozen"
        return release.wait(4 * DEADLINE_S)

    def free() -> Steps:
        yield "healthy"
        done.set()
        return True

    for _ in range(20):
        made.until_true(stuck)
    made.until_true(free)
    assert done.wait(DEADLINE_S)
    # At most two threads in each of three lanes (one is for first steps), and an idle thread.
    assert sum(one.is_alive() for one in made._threads) <= 3 * 2 + 1
    release.set()
    made.close()
    made.join(DEADLINE_S)
    assert not any(one.is_alive() for one in made._threads)


def test_an_attempt_that_raises_ends_the_source_that_made_it() -> None:
    errors: list[KeyShardError] = []
    with owned_by(errors.append):
        made = Retrier()

    def attempt() -> Steps:
        yield "lane"
        raise ValueError("unexpected")

    made.until_true(attempt)
    wait_until(lambda: errors)
    assert "unexpected" in str(errors[0])
    made.close()
    made.join(DEADLINE_S)


def test_a_retrier_starts_due_attempts_while_all_its_threads_are_busy() -> None:
    made, release = Retrier(lane_threads_max=1), threading.Event()
    done = threading.Event()

    def stuck() -> Steps:
        yield "frozen"
        return release.wait(4 * DEADLINE_S)

    made.until_true(stuck)

    def free() -> bool:
        done.set()
        return True

    made.until_true(free, 0.2)
    assert done.wait(DEADLINE_S)
    release.set()
    made.close()
    made.join(DEADLINE_S)


def test_a_broker_that_only_listens_costs_attempts_little(
    cluster: Cluster, connect: Callable[..., WireBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt to connect waits for its own deadline; those that wait behind it do not."""
    monkeypatch.setattr(connection_pool, "SLOW_S", deadline(0.2))
    first = cluster.broker()
    listening = socket.create_server(("127.0.0.1", 0), backlog=512)
    broker = connect(first, connection_timeout_ms=400, operation_timeout_ms=10_000)
    address = Address("127.0.0.1", listening.getsockname()[1])
    shared = broker._shared.pool
    began_s, errors = time.monotonic(), list[str]()

    def ask() -> None:
        try:
            shared._connect(address, time.monotonic() + deadline(10))
        except BrokerUnavailableError as exc:
            errors.append(str(exc))

    threads = [threading.Thread(target=ask) for _ in range(60)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    listening.close()
    assert len(errors) == 60
    assert time.monotonic() - began_s < deadline(20), "one after the other, they take 24 s"


def test_attempts_continue_where_the_system_starts_no_thread_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread that did not start counted as a waiting one, so no other thread was started."""
    start, full = threading.Thread.start, threading.Event()

    def limited(thread: threading.Thread) -> None:
        if full.is_set():
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    retrier = Retrier()
    made: list[int] = []

    def attempt(number: int) -> Callable[[], bool]:
        def attempted() -> bool:
            made.append(number)
            return True

        return attempted

    full.set()
    with pytest.raises(ThreadStartError):
        retrier.until_true(attempt(1))
    full.clear()
    retrier.until_true(attempt(2))
    wait_until(lambda: sorted(made) == [1, 2])
    full.set()
    for number in (3, 4, 5):
        retrier.until_true(attempt(number))
    wait_until(lambda: sorted(made) == [1, 2, 3, 4, 5])
    retrier.close()
    retrier.join(DEADLINE_S)


def test_a_broker_that_only_pings_does_not_keep_the_first_question_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight, "ANSWER_S", 0.3)
    ping = bytes.fromhex("00000009000000050812920100")
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def flood() -> None:
            peer, _ = listening.accept()
            peer.settimeout(0)
            end_s = time.monotonic() + deadline(5)
            with peer, suppress(ConnectionError):
                while time.monotonic() < end_s:
                    with suppress(BlockingIOError):
                        peer.recv(1 << 16)
                    with suppress(BlockingIOError):
                        peer.send(ping * 1_000)
                    time.sleep(0)

        thread = threading.Thread(target=flood, daemon=True)
        thread.start()
        connection = Connection(f"pulsar://127.0.0.1:{listening.getsockname()[1]}")
        began_s = time.monotonic()
        with pytest.raises(BrokerUnavailableError, match="does not answer"):
            preflight.missing_topics(connection, Credentials(connection), [])
        assert time.monotonic() - began_s < deadline(4)
        thread.join(DEADLINE_S)
