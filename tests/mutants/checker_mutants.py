"""Mutants of the checkers that judge histories."""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant, killer

OF_CHECKERS = (
    Mutant(
        name="take the longest of the runs that were broken off for a whole one",
        promise="No false alarm: tasks read parts at once, so neither run contains the other.",
        edits=(
            Edit(
                "keyshard/testing/verify/check_messages.py",
                "        for part, rows in _parts(run).items():\n"
                "            if len(rows) > len(whole.get(part, ())):\n"
                "                whole[part] = rows\n",
                "        if len(run.rows) > sum(map(len, whole.values())):\n"
                "            whole = _parts(run)\n",
            ),
        ),
        killers=(
            killer("unit/test_checkers", "test_allowed_options_pass"),
            killer(
                "property/test_checkers",
                "test_runs_that_were_broken_off_are_equal_though_none_contains_another",
            ),
        ),
    ),
    Mutant(
        name="excuse what a fault brings back only where it comes before all else of its key",
        promise="No false alarm: what was received before a broker forgot goes on meanwhile.",
        edits=(
            Edit(
                "keyshard/testing/verify/check_messages.py",
                "        last[routing_name] = event\n",
                "        last[routing_name] = event\n"
                "        used[routing_name] = faults_of.get(routing_name, 0)\n"
                "        faults_of[routing_name] = faults\n",
            ),
        ),
        killers=(killer("unit/test_checkers", "test_allowed_options_pass"),),
    ),
    Mutant(
        name="let a key start again as often as it likes after a fault",
        promise="Order: after a fault a key starts again once, and from there in order.",
        edits=(
            Edit(
                "keyshard/testing/verify/check_messages.py",
                "max(faults_then, then)",
                "faults_then",
            ),
        ),
        killers=(killer("unit/test_checkers", "test_a_broken_promise_is_found_and_shown"),),
    ),
    Mutant(
        name="excuse a dead letter between older messages that never runs again behind them",
        promise="Order: the last run of a message is never behind that of a newer dead letter.",
        edits=(
            Edit(
                "keyshard/testing/verify/check_messages.py",
                "            dead_letters.owe(ahead, event)\n",
                "            pass\n",
            ),
        ),
        killers=(killer("unit/test_checkers", "test_a_broken_promise_is_found_and_shown"),),
    ),
    Mutant(
        name="let no key start again with a redelivered message that became a dead letter",
        promise="No false alarm: a redelivered message of a parked key becomes a dead letter.",
        edits=(
            Edit(
                "keyshard/testing/verify/check_messages.py",
                "is_dead_letter and not starts_again",
                "is_dead_letter",
            ),
        ),
        killers=(killer("unit/test_checkers", "test_allowed_options_pass"),),
    ),
    Mutant(
        name="take every message that comes before older ones for a dead letter",
        promise="Order: only dead letters may run between older messages that a fault repeats.",
        edits=(
            Edit(
                "keyshard/testing/verify/history_view.py",
                'event.kind == "started" and resting.has(event.stored)',
                'event.kind == "started"',
            ),
        ),
        killers=(killer("unit/test_checkers", "test_a_broken_promise_is_found_and_shown"),),
    ),
)
