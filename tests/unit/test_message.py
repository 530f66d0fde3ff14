"""Messages for tests of a handler, and the types of the options of a run."""

from __future__ import annotations

import pickle
from datetime import datetime, timezone
from typing import get_type_hints

import pytest

from keyshard import HandlerConfig, Message
from keyshard.config.handlers import HandlerOptions
from keyshard.core.ring.key_slot import key_slot


def test_a_message_for_a_test_is_like_one_of_a_source() -> None:
    made = Message.for_test(b"content", key="order-17", properties={"trace": "1"})
    assert (made.value, made.key, made.routing_key) == (b"content", "order-17", "order-17")
    assert made.slot == key_slot("order-17")
    assert made.properties == {"trace": "1"}
    assert made.publish_time.tzinfo is not None
    assert made.event_time is None
    assert str(made.message_id) == "1:0:0"
    assert pickle.loads(pickle.dumps(made)) == made
    assert made == Message.for_test(b"content", key="order-17", properties={"trace": "1"})
    ordered = Message.for_test(
        b"", key="a", ordering_key="b", event_time=datetime(2026, 1, 1, tzinfo=timezone.utc)
    )
    assert (ordered.routing_key, ordered.slot) == ("b", key_slot("b"))
    assert Message.for_test(b"").slot is None
    assert Message.for_test(None, key="").slot == key_slot("")
    assert Message.for_test(None).value is None
    with pytest.raises(TypeError, match="bytes or None, not str"):
        Message.for_test("text")  # type: ignore[arg-type]


def test_editors_know_every_option_of_a_run() -> None:
    assert get_type_hints(HandlerOptions) == get_type_hints(HandlerConfig), (
        "HandlerOptions has the fields of HandlerConfig, with their types"
    )
