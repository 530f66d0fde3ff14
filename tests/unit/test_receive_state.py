"""When a range consumer is received from: every state and event, times, and connections."""

from __future__ import annotations

from itertools import product

import pytest

from keyshard.consumers.receive_state import (
    TRANSITIONS,
    Link,
    ReceiveEvent,
    ReceiveState,
    Receiving,
    Rest,
    Turn,
    link_of,
)

TABLE = {
    #              READY     SERVED    PAUSED    RESTING   IDLE
    ReceiveEvent.ROOM:    "SERVED   -         SERVED    -         -",
    ReceiveEvent.FULL:    "PAUSED   -         PAUSED    -         -",
    ReceiveEvent.RESTED:  "-        -         -         SERVED    -",
    ReceiveEvent.DONE:    "-        READY     -         -         -",
    ReceiveEvent.NOTHING: "-        IDLE      -         -         -",
    ReceiveEvent.REST:    "RESTING  RESTING   -         -         RESTING",
    ReceiveEvent.RING:    "-        -         -         -         READY",
    ReceiveEvent.ANEW:    "READY    SERVED    PAUSED    RESTING   READY",
    ReceiveEvent.CLOSE:   "CLOSED   CLOSED    CLOSED    CLOSED    CLOSED",
}  # fmt: skip
"""Where each event leads, by the state before; from CLOSED none leads anywhere."""


def in_state(state: ReceiveState) -> Receiving:
    made = Receiving()
    made.state = state
    return made


@pytest.mark.parametrize(("event", "state"), list(product(ReceiveEvent, ReceiveState)))
def test_each_event_leads_from_each_state_to_the_state_of_the_table(
    event: ReceiveEvent, state: ReceiveState
) -> None:
    leads = dict(zip(ReceiveState, [*TABLE[event].split(), "-"], strict=True))[state]
    reception = in_state(state)
    if leads == "-":
        with pytest.raises(AssertionError, match=f"{event} of a range consumer that is {state}"):
            reception.apply(event)
        assert reception.state is state
    else:
        reception.apply(event)
        assert reception.state is ReceiveState[leads]


def test_the_table_is_whole() -> None:
    assert set(TRANSITIONS) == set(TABLE) == set(ReceiveEvent)


@pytest.mark.parametrize("room", [True, False])
@pytest.mark.parametrize("state", [ReceiveState.READY, ReceiveState.PAUSED])
def test_a_range_with_room_is_received_from(state: ReceiveState, room: bool) -> None:
    reception = in_state(state)
    assert reception.turn(0.0, room=room) is (Turn.RECEIVE if room else Turn.LOOK_AGAIN)
    assert reception.state is (ReceiveState.SERVED if room else ReceiveState.PAUSED)


@pytest.mark.parametrize("state", [ReceiveState.SERVED, ReceiveState.IDLE, ReceiveState.READY])
def test_a_resting_range_is_received_from_after_its_time_if_there_is_room(
    state: ReceiveState,
) -> None:
    reception = in_state(state)
    # A range in the queue is met at its turn, so it must not be looked at twice.
    assert reception.rest(Rest(until_s=5.0)) is (state is not ReceiveState.READY)
    assert reception.turn(4.9, room=True) is Turn.LOOK_AGAIN
    assert reception.turn(5.0, room=False) is Turn.LOOK_AGAIN
    assert not reception.rings()
    assert not reception.anew(), "a successor ends no rest"
    assert reception.state is ReceiveState.RESTING
    assert reception.turn(5.0, room=True) is Turn.RECEIVE_ANEW
    assert reception.state is ReceiveState.SERVED


@pytest.mark.parametrize("state", list(ReceiveState))
def test_only_an_idle_range_is_queued_when_its_client_notifies_it(state: ReceiveState) -> None:
    reception = in_state(state)
    assert reception.rings() is (state is ReceiveState.IDLE)
    assert reception.state is (ReceiveState.READY if state is ReceiveState.IDLE else state)


@pytest.mark.parametrize(
    "state", [state for state in ReceiveState if state is not ReceiveState.CLOSED]
)
def test_only_an_idle_range_is_queued_with_a_new_consumer(state: ReceiveState) -> None:
    reception = in_state(state)
    assert reception.anew() is (state is ReceiveState.IDLE)


def test_silence_counts_from_when_the_consumer_is_seen_connected() -> None:
    reception = in_state(ReceiveState.IDLE)
    reception.received(100.0)
    assert not reception.is_silent(100.5, 1.0, connected=True)
    assert not reception.is_silent(101.5, 1.0, connected=True)
    assert reception.is_silent(101.6, 1.0, connected=True)
    assert not reception.may_be_cut
    assert not reception.is_silent(102.3, 1.0, connected=False)
    assert reception.may_be_cut
    assert not reception.is_silent(102.4, 1.0, connected=True), "it reconnected"
    assert not reception.is_silent(103.0, 1.0, connected=True)
    assert reception.is_silent(103.5, 1.0, connected=True)
    assert reception.may_be_cut, "since something came"
    reception.received(103.6)
    assert not reception.may_be_cut
    assert not reception.is_silent(104.0, 1.0, connected=True)
    reception.anew()
    assert not reception.is_silent(104.9, 1.0, connected=True), "it has another consumer"


def test_a_long_unobserved_consumer_may_have_reconnected() -> None:
    reception = in_state(ReceiveState.IDLE)
    reception.received(100.0)
    assert not reception.is_silent(101.5, 1.0, connected=True)
    assert reception.may_be_cut
    assert not reception.is_silent(102.4, 1.0, connected=True)
    assert not reception.is_silent(103.5, 1.0, connected=True), "nobody looked again"
    assert not reception.is_silent(104.4, 1.0, connected=True)
    assert reception.is_silent(104.6, 1.0, connected=True)


@pytest.mark.parametrize(
    ("connected", "successor", "due_s", "link"),
    [
        (True, False, 0.0, Link.CONNECTED),
        (True, False, 10.0, Link.CONNECTED),
        (False, False, 0.0, Link.AWAY),
        (False, False, 10.1, Link.AWAY),
        (False, False, 10.0, Link.DUE),
        (False, True, 10.0, Link.SUCCEEDED),
        (True, True, 0.0, Link.SUCCEEDED),
    ],
)
def test_a_range_that_is_away_for_long_needs_another_consumer(
    connected: bool, successor: bool, due_s: float, link: Link
) -> None:
    assert link_of(10.0, connected=connected, successor=successor, due_s=due_s) is link
