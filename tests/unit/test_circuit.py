"""The circuit: most keys failing at once is weather, one key failing is poison."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keyshard.core.lanes.circuit import (
    CALM_S,
    KEYS_MAX,
    KEYS_MIN,
    MEMORY_S,
    PAUSE_MAX_S,
    PAUSE_S,
    PROBES,
    Circuit,
    CircuitState,
)


def opened(at_s: float = 0.0, keys: int = KEYS_MIN) -> Circuit:
    circuit = Circuit()
    results = [circuit.failed(f"k{n}", at_s, "no database") for n in range(keys)]
    assert results == [n == KEYS_MIN - 1 for n in range(keys)]
    circuit.validate()
    return circuit


def probe(circuit: Circuit, now_s: float) -> list[str]:
    """Start all probes of a round."""
    keys = []
    while circuit.may_start(now_s) and not circuit.closed:
        keys.append(f"probe-{now_s}-{len(keys)}")
        circuit.started(keys[-1])
    circuit.validate()
    return keys


def test_one_key_that_fails_for_ever_opens_nothing() -> None:
    circuit = Circuit()
    for now in range(100):
        assert not circuit.failed("bad", now, "no")
        assert circuit.may_start(now)
    assert circuit.keys == (1, 1)


def test_bad_keys_among_good_ones_open_nothing() -> None:
    circuit = Circuit()
    for now in range(1_000):
        key = f"k{now % 40}"
        if now % 40 < 20:
            assert not circuit.failed(key, now / 100, "no")
        else:
            circuit.succeeded(key, now / 100)
        if now < 10:
            circuit.succeeded(f"before-{now}", now / 100)
        circuit.validate()


def test_most_keys_failing_at_once_open_it_whatever_succeeded_before() -> None:
    circuit = Circuit()
    for n in range(10_000):
        circuit.succeeded(f"k{n % 500}", n / 1_000)
    failed = 0
    while not circuit.failed(f"k{failed}", 10.0, "no database"):
        failed += 1
    assert failed < KEYS_MIN
    assert not circuit.may_start(10.0)
    assert circuit.openings == 1


def test_it_opens_beside_a_bad_key_too() -> None:
    circuit = Circuit()
    circuit.failed("bad", 0.0, "no")
    for n in range(1_000):
        circuit.succeeded(f"k{n}", 1.0)
    opened_at = [n for n in range(1_000) if circuit.failed(f"k{n}", 2.0, "no database")]
    assert len(opened_at) == 1
    assert opened_at[0] < KEYS_MAX


def test_failures_of_another_time_say_nothing() -> None:
    circuit = Circuit()
    for n in range(10 * KEYS_MIN):
        assert not circuit.failed(f"k{n}", n * MEMORY_S / (KEYS_MIN - 1) * 1.01, "no")
        circuit.validate()


def test_a_probe_that_succeeds_closes_it() -> None:
    circuit = opened()
    assert not circuit.may_start(PAUSE_S - 0.01)
    first, *others = probe(circuit, PAUSE_S)
    assert len(others) == PROBES - 1
    assert circuit.succeeded(first, PAUSE_S)
    assert circuit.closed
    circuit.validate()
    assert not circuit.failed(others[0], PAUSE_S, "late"), "one late failure opens nothing"


def test_probes_that_fail_double_the_pause_up_to_its_limit() -> None:
    circuit, now, pauses = opened(), PAUSE_S, []
    for _ in range(8):
        for key in probe(circuit, now):
            assert not circuit.failed(key, now, "still away")
        assert circuit.state is CircuitState.OPEN
        next_s = circuit.status(now)["nextProbeInSeconds"]
        pauses.append(next_s)
        assert not circuit.may_start(now + next_s - 0.01)
        now += next_s
        circuit.validate()
    assert pauses[:3] == [2 * PAUSE_S, 4 * PAUSE_S, 8 * PAUSE_S]
    assert pauses[-1] == PAUSE_MAX_S
    assert circuit.openings == 1


def test_success_of_what_began_before_it_opened_does_not_close_it() -> None:
    circuit = opened()
    assert not circuit.succeeded("slow", 0.1)
    assert not circuit.may_start(0.1)
    for n in range(KEYS_MIN):
        circuit.succeeded(f"k{n}", 0.2)
    (first, *_) = probe(circuit, PAUSE_S)
    assert circuit.succeeded(first, PAUSE_S), "also when no key is known to fail any more"


def test_a_round_ends_with_the_first_key_that_is_tried_twice() -> None:
    circuit = opened()
    for ended in (False, True):
        assert circuit.may_start(PAUSE_S)
        circuit.started("only")
        assert not circuit.may_start(PAUSE_S) or not ended
        circuit.failed("only", PAUSE_S, "still away")
        assert (circuit.state is CircuitState.OPEN) == ended
        circuit.validate()


def test_a_probe_whose_handler_asks_for_another_time_ends_its_round_too() -> None:
    circuit = opened()
    for key in probe(circuit, PAUSE_S):
        circuit.undecided(key, PAUSE_S)
    assert circuit.state is CircuitState.OPEN


def test_it_opens_with_the_pause_it_had_unless_it_was_calm_for_a_while() -> None:
    circuit = opened()
    for key in probe(circuit, PAUSE_S):
        circuit.failed(key, PAUSE_S, "still away")
    first, *_ = probe(circuit, 10.0)
    circuit.succeeded(first, 10.0)
    for n in range(KEYS_MIN + 1):
        circuit.failed(f"k{n}", 11.0, "away again")
    assert circuit.status(11.0)["nextProbeInSeconds"] == 2 * PAUSE_S
    first, *_ = probe(circuit, 20.0)
    circuit.succeeded(first, 20.0)
    for n in range(KEYS_MIN):
        circuit.failed(f"k{n}", 20.0 + CALM_S, "away again")
    assert circuit.status(20.0 + CALM_S)["nextProbeInSeconds"] == PAUSE_S


def test_bad_keys_that_opened_it_are_known_beside_the_good_ones_that_came_after() -> None:
    circuit = opened(keys=KEYS_MIN)
    (first, *_), now = probe(circuit, PAUSE_S), PAUSE_S
    circuit.succeeded(first, now)
    for n in range(20):
        circuit.succeeded(f"good{n}", now)
    for attempt in range(20):
        now += 0.5
        for n in range(KEYS_MIN):
            assert not circuit.failed(f"k{n}", now, "no"), f"attempt {attempt} is weather"
        circuit.validate()


def test_probes_come_to_a_key_that_succeeds_soon_wherever_it_waits() -> None:
    circuit, now, tried = opened(), PAUSE_S, 0
    while tried < 90:
        for key in probe(circuit, now):
            tried += 1
            circuit.failed(key, now, "no")
        now += circuit.status(now)["nextProbeInSeconds"]
    assert now < 30.0


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["start", "succeed", "fail", "undecided"]),
        st.integers(0, 200),
        st.floats(0.0, 20.0),
    )
)


@given(STEPS)
def test_whatever_happens_its_facts_agree_and_a_probe_comes(
    steps: list[tuple[str, int, float]],
) -> None:
    circuit, now = Circuit(), 0.0
    for what, key, seconds in steps:
        now += seconds
        if what == "start":
            if circuit.may_start(now):
                circuit.started(key)
        elif what == "succeed":
            circuit.succeeded(key, now)
        elif what == "fail":
            circuit.failed(key, now, "no")
        else:
            circuit.undecided(key, now)
        circuit.validate()
        assert (
            circuit.state is not CircuitState.OPEN
            or circuit.status(now)["nextProbeInSeconds"] <= PAUSE_MAX_S
        )
    for key in list(circuit._probes):
        circuit.undecided(key, now)
    assert circuit.may_start(now + PAUSE_MAX_S)
