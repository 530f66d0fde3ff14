"""When a range consumer is received from: every state and event, times, and connections."""

from __future__ import annotations

from itertools import product

import pytest

from keyshard.core.reception import (
    TRANSITIONS,
    Event,
    Link,
    Reception,
    Rest,
    State,
    Turn,
    link_of,
)

TABLE = {
    #              READY     SERVED    PAUSED    RESTING   IDLE
    Event.ROOM:    "SERVED   -         SERVED    -         -",
    Event.FULL:    "PAUSED   -         PAUSED    -         -",
    Event.RESTED:  "-        -         -         SERVED    -",
    Event.DONE:    "-        READY     -         -         -",
    Event.NOTHING: "-        IDLE      -         -         -",
    Event.REST:    "RESTING  RESTING   -         -         RESTING",
    Event.RING:    "-        -         -         -         READY",
    Event.ANEW:    "READY    SERVED    PAUSED    RESTING   READY",
    Event.CLOSE:   "CLOSED   CLOSED    CLOSED    CLOSED    CLOSED",
}  # fmt: skip
"""Where each event leads, by the state before; from CLOSED none leads anywhere."""


def in_state(state: State) -> Reception:
    made = Reception()
    made.state = state
    return made


@pytest.mark.parametrize(("event", "state"), list(product(Event, State)))
def test_each_event_leads_from_each_state_where_the_table_says(event: Event, state: State) -> None:
    leads = dict(zip(State, [*TABLE[event].split(), "-"], strict=True))[state]
    reception = in_state(state)
    if leads == "-":
        with pytest.raises(AssertionError, match=f"{event} of a range consumer that is {state}"):
            reception.tell(event)
        assert reception.state is state
    else:
        reception.tell(event)
        assert reception.state is State[leads]


def test_the_table_is_whole() -> None:
    assert set(TRANSITIONS) == set(TABLE) == set(Event)


@pytest.mark.parametrize("room", [True, False])
@pytest.mark.parametrize("state", [State.READY, State.PAUSED])
def test_who_has_room_is_received_from(state: State, room: bool) -> None:
    reception = in_state(state)
    assert reception.turn(0.0, room=room) is (Turn.RECEIVE if room else Turn.LOOK_AGAIN)
    assert reception.state is (State.SERVED if room else State.PAUSED)


@pytest.mark.parametrize("state", [State.SERVED, State.IDLE, State.READY])
def test_who_rests_is_received_from_anew_when_its_time_is_over_and_there_is_room(
    state: State,
) -> None:
    reception = in_state(state)
    # Who lines up is met at its turn, so it must not be looked at twice.
    assert reception.rest(Rest(until_s=5.0)) is (state is not State.READY)
    assert reception.turn(4.9, room=True) is Turn.LOOK_AGAIN
    assert reception.turn(5.0, room=False) is Turn.LOOK_AGAIN
    assert not reception.rings()
    assert not reception.anew(), "a successor ends no rest"
    assert reception.state is State.RESTING
    assert reception.turn(5.0, room=True) is Turn.RECEIVE_ANEW
    assert reception.state is State.SERVED


@pytest.mark.parametrize("state", list(State))
def test_only_who_is_idle_lines_up_when_its_client_rings(state: State) -> None:
    reception = in_state(state)
    assert reception.rings() is (state is State.IDLE)
    assert reception.state is (State.READY if state is State.IDLE else state)


@pytest.mark.parametrize("state", [state for state in State if state is not State.CLOSED])
def test_only_who_is_idle_lines_up_with_a_new_consumer(state: State) -> None:
    reception = in_state(state)
    assert reception.anew() is (state is State.IDLE)


def test_silence_counts_from_when_the_consumer_is_seen_connected() -> None:
    reception = in_state(State.IDLE)
    reception.heard(100.0)
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
    reception.heard(103.6)
    assert not reception.may_be_cut
    assert not reception.is_silent(104.0, 1.0, connected=True)
    reception.anew()
    assert not reception.is_silent(104.9, 1.0, connected=True), "it has another consumer"


def test_where_nobody_looked_for_long_it_may_have_reconnected() -> None:
    reception = in_state(State.IDLE)
    reception.heard(100.0)
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
def test_another_consumer_is_due_for_who_is_away_for_long(
    connected: bool, successor: bool, due_s: float, link: Link
) -> None:
    assert link_of(10.0, connected=connected, successor=successor, due_s=due_s) is link
