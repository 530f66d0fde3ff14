"""The circuit breaker: most keys failing at once is an outage, single keys are poison."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keyshard.core.lanes.circuit_breaker import (
    CALM_S,
    KEYS_MAX,
    KEYS_MIN,
    MEMORY_S,
    ON_TRIAL_MAX,
    PAUSE_MAX_S,
    PAUSE_S,
    PROBES,
    QUIET_S,
    STUCK_S,
    CircuitBreaker,
    CircuitState,
)
from tests.helpers import present


def opened(at_s: float = 0.0, circuit: CircuitBreaker | None = None) -> CircuitBreaker:
    """Return a breaker whose circuit opens at ``at_s``, because nothing succeeds before."""
    circuit = circuit or CircuitBreaker()
    began_s = at_s - QUIET_S
    counts = [circuit.failed(f"k{n}", began_s, "no database") for n in range(KEYS_MIN)]
    assert counts == [True] * (KEYS_MIN - 1) + [False], "failures under suspicion do not count"
    assert circuit.may_start(at_s - 0.001), "other keys are tried meanwhile"
    assert not circuit.may_start(at_s)
    assert circuit.state is CircuitState.OPEN
    circuit.validate()
    return circuit


def probe(circuit: CircuitBreaker, now_s: float) -> list[str]:
    """Start all probes of a round."""
    keys: list[str] = []
    while circuit.may_start(now_s) and not circuit.closed:
        keys.append(f"probe-{now_s}-{len(keys)}")
        circuit.started(keys[-1])
    circuit.validate()
    return keys


def works(circuit: CircuitBreaker, key: str, now_s: float) -> bool:
    """Record a success that takes no time; return whether it closes the circuit."""
    closes = circuit.succeeded(key, now_s, now_s)
    circuit.validate()
    return closes


def test_one_key_that_fails_for_ever_opens_nothing() -> None:
    circuit = CircuitBreaker()
    for now in range(100):
        assert circuit.failed("bad", now, "no", 0.0)
        assert circuit.may_start(now)
    assert circuit.keys == (1, 1)


def test_bad_keys_among_good_ones_open_nothing() -> None:
    """Issue: 3,000 bad keys beside good ones opened it again and again, and none was parked."""
    circuit, bad = CircuitBreaker(), 3_000
    for attempt in range(8):
        for n in range(bad):
            now = attempt + n / bad
            first_s = n / bad if attempt else None
            counts = circuit.failed(f"bad{n}", now, "no", first_s)
            assert counts or not attempt, "later attempts count"
            assert circuit.may_start(now)
            if not n % 500:
                works(circuit, f"good{n}", now)
    assert circuit.openings == 0


def test_good_keys_that_turn_bad_open_nothing_beside_others_that_are_good() -> None:
    circuit = CircuitBreaker()
    for n in range(200):
        works(circuit, f"k{n % 20}", n / 100)
    for n in range(400):
        now = 2.0 + n / 100
        if n % 20 < 10:
            circuit.failed(f"k{n % 20}", now, "no", 2.0 if n >= 20 else None)
        else:
            works(circuit, f"k{n % 20}", now)
        assert circuit.may_start(now)
    assert circuit.openings == 0


def test_most_of_the_keys_that_succeeded_open_it_though_some_still_succeed() -> None:
    circuit = CircuitBreaker()
    for n in range(20):
        works(circuit, f"k{n}", n / 100)
    tries = 0
    while circuit.closed:
        tries += 1
        now = 1.0 + tries / 100
        if tries % 10:
            circuit.failed(f"k{tries % 20}", now, "no shard", None if tries <= 20 else 1.0)
        else:
            works(circuit, f"k{tries % 20}", now)
    assert tries <= 40
    assert circuit.openings == 1


def test_a_time_without_success_opens_it_despite_earlier_successes() -> None:
    circuit = CircuitBreaker()
    for n in range(10_000):
        works(circuit, f"k{n % 500}", n / 1_000)
    opened(20.0, circuit)
    assert circuit.openings == 1


def test_successes_all_the_time_keep_it_closed_though_keys_fail_while_they_run() -> None:
    """Issue: five keys that failed while a good one was handled kept the circuit half open."""
    circuit = CircuitBreaker()
    for n in range(100):
        began_s = n / 10
        for bad in range(2 * KEYS_MIN):
            circuit.failed(f"bad{n}-{bad}", began_s + 0.05, "no")
        works_since(circuit, f"good{n % 3}", began_s, began_s + 0.1)
        assert circuit.may_start(began_s + 0.1)
    assert circuit.openings == 0


def works_since(circuit: CircuitBreaker, key: str, began_s: float, now_s: float) -> None:
    circuit.succeeded(key, began_s, now_s)
    circuit.validate()


def test_under_suspicion_keys_that_succeeded_before_are_tried_at_once() -> None:
    """Issue: such keys waited behind all untried keys, and the circuit opened after 1 s."""
    circuit = CircuitBreaker()
    for n in range(10):
        works(circuit, f"good{n}", n / 10)
    assert not list(circuit.controls())
    for n in range(KEYS_MIN):
        circuit.failed(f"bad{n}", 1.0, "no")
    key = next(circuit.controls())
    assert key == "good9", "the one that succeeded last"
    circuit.started(key, control=True)
    circuit.validate()
    assert not list(circuit.controls()), "one at a time"
    works_since(circuit, str(key), 1.1, 1.1)
    assert not list(circuit.controls())
    assert circuit.may_start(1.0 + QUIET_S)
    assert circuit.openings == 0


def test_a_success_refutes_only_failures_from_before_it_started() -> None:
    circuit = CircuitBreaker()
    for n in range(KEYS_MIN):
        circuit.failed(f"k{n}", 1.0, "no database")
    circuit.succeeded("slow", 0.5, 1.5)
    assert not circuit.may_start(1.0 + QUIET_S), "it may have used the database before"
    circuit = CircuitBreaker()
    for n in range(KEYS_MIN):
        circuit.failed(f"k{n}", 1.0, "bad")
    circuit.succeeded("good", 1.1, 1.5)
    assert circuit.may_start(1.0 + QUIET_S)
    assert circuit.failed("k0", 3.0, "bad", 1.0), "its retries count"


def test_old_failures_are_no_evidence_of_an_outage() -> None:
    circuit = CircuitBreaker()
    for n in range(10 * KEYS_MIN):
        now = n * MEMORY_S / (KEYS_MIN - 1) * 1.01
        assert circuit.failed(f"k{n}", now, "no")
        assert circuit.may_start(now + QUIET_S)
        circuit.validate()


def test_a_probe_that_succeeds_closes_it() -> None:
    circuit = opened()
    assert not circuit.may_start(PAUSE_S - 0.01)
    first, *others = probe(circuit, PAUSE_S)
    assert len(others) == PROBES - 1
    assert works(circuit, first, PAUSE_S)
    assert circuit.closed
    assert circuit.failed(others[0], PAUSE_S, "late")
    assert circuit.may_start(PAUSE_S + QUIET_S), "one late failure opens nothing"


def test_a_probe_that_hangs_does_not_keep_the_next_ones_from_being_tried() -> None:
    """Issue: one hung probe stopped every key until it returned."""
    circuit, now = opened(), PAUSE_S
    hung, *others = probe(circuit, now)
    for key in others:
        circuit.failed(key, now, "still away")
    assert not circuit.may_start(now)
    now += PAUSE_S
    assert not circuit.may_start(now), "its round is over"
    assert circuit.state is CircuitState.OPEN
    now += present(circuit.status(now)["nextProbeInSeconds"])
    next_round = probe(circuit, now)
    assert len(next_round) == 2 * PROBES
    circuit.failed(hung, now, "late")
    circuit.validate()
    assert works(circuit, next_round[0], now), "the end of a hung probe ends no other round"


def test_probes_that_all_hang_are_followed_by_others() -> None:
    circuit, now, tried = opened(), 0.0, 0
    for _ in range(20):
        now += PAUSE_MAX_S
        tried += len(probe(circuit, now))
    assert tried > KEYS_MAX


def test_a_key_that_succeeded_before_is_tried_at_once_while_it_is_open() -> None:
    circuit = CircuitBreaker()
    for n in range(10):
        works(circuit, f"good{n}", n / 10)
    opened(10.0, circuit)
    key = next(circuit.controls())
    assert key == "good9", "the one that succeeded last"
    circuit.started(key, control=True)
    circuit.validate()
    assert not list(circuit.controls()), "one at a time"
    assert works(circuit, str(key), 10.0)


def test_a_round_tries_few_controls_and_the_next_round_others() -> None:
    """A control is a key that succeeded before. It is tried at once."""
    circuit = CircuitBreaker()
    for n in range(10):
        works(circuit, f"good{n}", n / 10)
    opened(10.0, circuit)
    tried = []
    while (key := next(circuit.controls(), None)) is not None:
        circuit.started(key, control=True)
        assert not circuit.failed(key, 10.0, "no database")
        circuit.validate()
        tried.append(key)
    assert len(set(tried)) == len(tried) == PROBES
    assert circuit.state is CircuitState.OPEN
    assert circuit.may_start(10.0 + PAUSE_S)
    assert next(circuit.controls()) not in tried


def test_an_attempt_that_began_under_suspicion_closes_the_circuit_if_it_succeeds() -> None:
    circuit = CircuitBreaker()
    for n in range(KEYS_MIN):
        circuit.failed(f"k{n}", 0.0, "bad")
    assert circuit.may_start(0.5)
    circuit.started("slow")
    assert not circuit.may_start(QUIET_S)
    assert circuit.succeeded("slow", 0.5, 3.0)
    circuit.validate()


def test_probes_that_fail_double_the_pause_up_to_its_limit() -> None:
    circuit, now, pauses = opened(), PAUSE_S, []
    for _ in range(8):
        for key in probe(circuit, now):
            assert not circuit.failed(key, now, "still away")
        assert circuit.state is CircuitState.OPEN
        next_s = present(circuit.status(now)["nextProbeInSeconds"])
        pauses.append(next_s)
        assert not circuit.may_start(now + next_s - 0.01)
        now += next_s
        circuit.validate()
    assert pauses[:3] == [2 * PAUSE_S, 4 * PAUSE_S, 8 * PAUSE_S]
    assert pauses[-1] == PAUSE_MAX_S
    assert circuit.openings == 1


def test_success_of_an_attempt_from_before_the_opening_does_not_close_it() -> None:
    circuit = opened()
    assert not works(circuit, "slow", 0.1)
    assert not circuit.may_start(0.1)
    for n in range(KEYS_MIN):
        works(circuit, f"k{n}", 0.2)
    (first, *_) = probe(circuit, PAUSE_S)
    assert works(circuit, first, PAUSE_S), "also when no key is known to fail any more"


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
    works(circuit, first, 10.0)
    opened(12.0, circuit)
    assert circuit.status(12.0)["nextProbeInSeconds"] == 2 * PAUSE_S
    first, *_ = probe(circuit, 20.0)
    works(circuit, first, 20.0)
    opened(20.0 + CALM_S, circuit)
    assert circuit.status(20.0 + CALM_S)["nextProbeInSeconds"] == PAUSE_S


def test_bad_keys_that_opened_it_do_not_open_it_again() -> None:
    circuit, now = opened(), PAUSE_S
    (first, *_) = probe(circuit, now)
    works(circuit, first, now)
    for attempt in range(20):
        now += 0.5
        for n in range(KEYS_MIN):
            assert circuit.failed(f"k{n}", now, "no", -QUIET_S), f"attempt {attempt} counts"
        assert circuit.may_start(now)
        circuit.validate()
    assert not circuit.counts_on(-QUIET_S), "what failed before it opened counts anew"
    assert circuit.openings == 1


def test_a_key_that_failed_beside_good_ones_keeps_its_attempts_when_it_opens() -> None:
    circuit = CircuitBreaker()
    circuit.failed("bad", 0.0, "no")
    works(circuit, "good", 0.5)
    opened(10.0, circuit)
    assert circuit.counts_on(0.0)
    assert not circuit.counts_on(5.0)


def test_probes_come_to_a_key_that_succeeds_soon_wherever_it_waits() -> None:
    circuit, now, tried = opened(), PAUSE_S, 0
    while tried < 90:
        for key in probe(circuit, now):
            tried += 1
            circuit.failed(key, now, "no")
        now += present(circuit.status(now)["nextProbeInSeconds"])
    assert now < 30.0


def test_while_no_key_can_succeed_only_failures_of_keys_on_trial_count() -> None:
    circuit = opened()
    circuit.stuck(1.0, is_stuck=True)
    circuit.stuck(2.0, is_stuck=True)
    assert not circuit.judges(0.99 + STUCK_S)
    now = 1.0 + STUCK_S
    assert circuit.judges(now)
    circuit.put_on_trial(["old"])
    assert circuit.failed("old", now, "no")
    assert not circuit.failed("new", now, "no")
    circuit.validate()
    assert "they fill the window" in str(circuit)
    assert circuit.status(now)["keysOnTrial"] == 1
    circuit.stuck(now, is_stuck=False)
    assert not circuit.failed("old", now, "no"), "another key came, which may succeed"
    circuit.stuck(now, is_stuck=True)
    assert not circuit.judges(now)
    first, *_ = probe(circuit, now)
    assert works(circuit, first, now)
    assert not circuit.status(now)["keysOnTrial"]
    circuit.stuck(now, is_stuck=True)
    circuit.validate()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["start", "succeed", "fail", "undecided", "control", "stuck", "trial"]),
        st.integers(0, 200),
        st.floats(0.0, 20.0),
    )
)


@given(STEPS)
def test_any_events_keep_the_invariants_and_another_key_is_tried_in_time(
    steps: list[tuple[str, int, float]],
) -> None:
    circuit, now = CircuitBreaker(), 0.0
    for what, key, seconds in steps:
        now += seconds
        if what == "start":
            if circuit.may_start(now):
                circuit.started(key)
        elif what == "succeed":
            circuit.succeeded(key, now - seconds, now)
        elif what == "control":
            for control in circuit.controls():
                circuit.started(control, control=True)
                break
        elif what == "stuck":
            circuit.stuck(now, is_stuck=bool(key % 8))
        elif what == "trial":
            if circuit.judges(now):
                circuit.put_on_trial(range(key % (ON_TRIAL_MAX + 1)))
        elif what == "fail":
            paused, judges = not circuit.closed, circuit.judges(now)
            counts = circuit.failed(key, now, "no", None if key % 3 else now - seconds)
            assert not (paused and counts) or (judges and key < ON_TRIAL_MAX)
        else:
            circuit.undecided(key, now)
        circuit.validate()
        assert (
            circuit.state is not CircuitState.OPEN
            or present(circuit.status(now)["nextProbeInSeconds"]) <= PAUSE_MAX_S
        )
    # Even if probes hang, another key is tried after a round and the time until the next one.
    circuit.may_start(now)
    circuit.may_start(now + PAUSE_MAX_S)
    assert circuit.may_start(now + 2 * PAUSE_MAX_S) or circuit.may_start(now + 3 * PAUSE_MAX_S)
