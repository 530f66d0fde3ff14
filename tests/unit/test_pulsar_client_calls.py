"""Calls of the Pulsar adapter to its client: in ordered mode, none that queues a message anew.

A negative acknowledgement, an acknowledgement timeout and the client's own dead letters give a
message back to the broker without its hash; a later one of its key then overtakes it.
"""

from __future__ import annotations

import weakref
from typing import Any

import _pulsar
import pulsar
import pytest

from keyshard.broker.client.broker import ClientBroker, ClientProducer
from keyshard.broker.client.calls import Calls
from keyshard.broker.client.consumer import ClientConsumer
from keyshard.broker.client.errors import translated
from keyshard.broker.port import StartPosition, SubscriptionSpec
from keyshard.config.connection import Connection
from keyshard.core.position.entry import EntryId
from keyshard.core.ring.hash_range import split_ring
from keyshard.core.window.receiver_queue_size import POLLED_MAX
from keyshard.errors import BrokerUnavailableError, TopicNotFoundError
from tests.helpers import P0, ids

REQUEUE_OPTIONS = {
    "unacked_messages_timeout_ms",
    "negative_ack_redelivery_delay_ms",
    "dead_letter_policy",
}
REQUEUE_CALLS = {
    "negative_acknowledge",
    "redeliver_unacknowledged_messages",
    "acknowledge_cumulative",
}


class RawMessage:
    """A message as the extension hands it out; this one was delivered before."""

    def __init__(self, entry: int) -> None:
        self._id = _pulsar.MessageId(0, 7, entry, -1)

    def message_id(self) -> Any:
        return self._id

    def data(self) -> bytes:
        return b"v"

    def partition_key(self) -> str:
        return "k"

    def ordering_key(self) -> str:
        return ""

    def encryption_context(self) -> None:
        return None

    def publish_timestamp(self) -> int:
        return 1_000

    def event_timestamp(self) -> int:
        return 0

    def properties(self) -> dict[str, str]:
        return {}

    def redelivery_count(self) -> int:
        return 3

    def int_schema_version(self) -> int:
        return -1


class RawConsumer:
    """Records its calls by name; returns two messages once."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._messages = [RawMessage(1), RawMessage(2)]

    def __getattr__(self, name: str) -> Any:
        self.asked.append(name)
        return lambda *_: None

    def receive(self, timeout_ms: int) -> RawMessage:
        self.asked.append("receive")
        assert timeout_ms == 0, "who polls does not wait"
        if not self._messages:
            raise pulsar.Timeout("nothing is there")
        return self._messages.pop(0)

    def batch_receive(self) -> list[RawMessage]:
        self.asked.append("batch_receive")
        messages, self._messages = self._messages, []
        return messages


class RecordedClient:
    """A replacement of ``pulsar.Client``."""

    def __init__(self) -> None:
        self._client = self
        self.raw = RawConsumer()
        self.options: dict[str, Any] = {}

    def subscribe(self, *_: str, **options: Any) -> Any:
        self.options = options
        self._consumer = self.raw
        return self


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> RecordedClient:
    client = RecordedClient()
    monkeypatch.setattr(pulsar, "Client", lambda *_, **__: client)
    monkeypatch.setattr("keyshard.broker.client.entries._Message", RawMessage)
    return client


def subscribed(client: RecordedClient, queue: int = 10) -> ClientConsumer:
    return ClientBroker(Connection("pulsar://nowhere")).subscribe(
        SubscriptionSpec(
            P0, "unit", split_ring(1)[0], consumer_name="c", receiver_queue_size=queue
        ),
        StartPosition.EARLIEST,
    )


def test_a_subscription_switches_on_nothing_that_queues_messages_again(
    client: RecordedClient,
) -> None:
    subscribed(client)
    assert client.options["consumer_type"] == pulsar.ConsumerType.KeyShared
    assert not REQUEUE_OPTIONS & client.options.keys()


@pytest.mark.parametrize(
    ("queue", "taken"), [(POLLED_MAX, ["receive"] * 3), (POLLED_MAX + 1, ["batch_receive"])]
)
def test_a_message_that_comes_again_is_received_and_acknowledged_and_nothing_else(
    client: RecordedClient, queue: int, taken: list[str]
) -> None:
    consumer = subscribed(client, queue)
    entries = consumer.receive(0)
    assert ids(entries) == [(7, 1), (7, 2)]
    consumer.acknowledge([EntryId(7, 1)])
    assert client.raw.asked == [*taken, "acknowledge"]


def test_the_names_of_forbidden_calls_exist_in_this_client() -> None:
    known = pulsar.Client.subscribe.__code__.co_varnames
    assert set(known) >= REQUEUE_OPTIONS
    assert all(hasattr(_pulsar.Consumer, name) for name in REQUEUE_CALLS)


DISCONNECTED = 46
"""``ResultDisconnected``; the client's Python names lack it."""


def lost(callback: Any) -> None:
    """Call back as the client does if it loses the connection: with a result and no value."""
    callback(pulsar.Result(DISCONNECTED), None)


def test_an_answer_that_never_came_is_an_error_and_no_value() -> None:
    """1. A request is on its way. 2. The connection is cut. 3. The waiting call gives a value."""
    with pytest.raises(BrokerUnavailableError), translated("ask", "t"):
        Calls().answer_of(lost)
    with pytest.raises(BrokerUnavailableError), translated("ask", "t"):
        Calls().answer_of(lambda callback: callback(pulsar.Result.Timeout, None))
    with pytest.raises(TopicNotFoundError), translated("ask", "t"):
        Calls().answer_of(lambda callback: callback(pulsar.Result.TopicNotFound, None))
    assert Calls().answer_of(lambda callback: callback(pulsar.Result.Ok, 5)) == 5


def test_a_callback_that_the_client_keeps_drops_its_arguments() -> None:
    """The client frees a Reader's callback with the Reader, and waits for that at its end."""

    class Reader:
        pass

    kept: list[Any] = []

    def ask(callback: Any) -> None:
        kept.append(callback)
        callback(pulsar.Result.Ok, Reader())

    reader = weakref.ref(Calls().answer_of(ask))
    assert kept
    assert reader() is None


def test_an_answer_without_partitions_is_an_error(client: RecordedClient) -> None:
    client.get_topic_partitions = lambda _topic: []  # type: ignore[attr-defined]
    with pytest.raises(BrokerUnavailableError):
        ClientBroker(Connection("pulsar://nowhere")).partitions("t")


def test_an_id_that_no_entry_has_is_no_confirmation() -> None:
    class Raw:
        def send_async(self, _message: object, callback: Any) -> None:
            callback(pulsar.Result.Ok, _pulsar.MessageId(-1, -1, -1, -1))

    class Wrapper:
        _producer = Raw()

    with pytest.raises(BrokerUnavailableError):
        ClientProducer(Wrapper(), P0, Calls()).send(b"v")  # type: ignore[arg-type]
