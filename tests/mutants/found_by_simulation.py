"""Mutants that are code as it was before the simulation found what was wrong with it."""

from __future__ import annotations

from table import Edit, Mutant, killer

FOUND_BY_SIMULATION = (
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
            killer("unit/test_checkers", "test_what_is_allowed_passes"),
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
        killers=(killer("unit/test_checkers", "test_what_is_allowed_passes"),),
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
        name="excuse a letter between older messages that never runs again behind them",
        promise="Order: the last run of a message is never behind that of a newer letter.",
        edits=(
            Edit(
                "keyshard/testing/verify/check_messages.py",
                "            letters.owe(ahead, event)\n",
                "            pass\n",
            ),
        ),
        killers=(killer("unit/test_checkers", "test_a_broken_promise_is_found_and_shown"),),
    ),
    Mutant(
        name="take every message that comes before older ones for a letter",
        promise="Order: only letters may run between older messages that a fault brings again.",
        edits=(
            Edit(
                "keyshard/testing/verify/history_view.py",
                'event.kind == "started" and resting.has(event.stored)',
                'event.kind == "started"',
            ),
        ),
        killers=(killer("unit/test_checkers", "test_a_broken_promise_is_found_and_shown"),),
    ),
    Mutant(
        name="forget at a restart a letter that is done and whose original is not committed",
        promise="Twice: what was replayed does not run again when its original comes again.",
        edits=(
            Edit(
                "keyshard/core/dead_letter/parked.py",
                "            begin = min(begin, done)\n",
                "            pass\n",
            ),
        ),
        killers=(
            killer("unit/test_parking"),
            killer(
                "runtime/test_parking_repeats",
                "test_a_letter_that_is_done_is_known_to_the_next_start_while_its_original_is_in_"
                "no_checkpoint",
            ),
        ),
    ),
    Mutant(
        name="end batches while an ack writes its checkpoint",
        promise="Twice: the checkpoint of a source that ended never replaces a newer one.",
        edits=(
            Edit(
                "keyshard/handlers/entry_run.py",
                "self._lock.acquire(timeout=self._end_timeout_s)",
                "self._lock.acquire(blocking=False)",
            ),
        ),
        killers=(
            killer("runtime/test_batches", "test_the_source_ends_when_an_ack_in_progress_has"),
        ),
    ),
    Mutant(
        name="settle in silence what somebody else acknowledged",
        promise="No loss without a word: failOnDataLoss ends a source that runs, too.",
        edits=(
            Edit(
                "keyshard/coordinator/settler.py",
                "            self._report_lost("
                "topic_partition, watched, lasting.settled & doubted)\n"
                "            _leave_out(lasting, doubted - watched.absent - watched.lost)\n",
                "",
            ),
        ),
        killers=(
            killer(
                "runtime/test_settler",
                "test_what_somebody_else_acknowledged_while_it_runs_ends_the_source",
            ),
        ),
    ),
    Mutant(
        name="drop a new entry as the redelivery of one under its id",
        promise="No loss without a word: a wiped broker hands out the same ids again.",
        edits=(
            Edit(
                "keyshard/core/window/partition_window.py",
                "            check_held(topic_partition, published_ms, block)\n",
                "",
            ),
        ),
        killers=(killer("unit/test_fingerprint"),),
    ),
    Mutant(
        name="read a batch again with what another topic has under its ids",
        promise="Exactly once: a batch that runs again has the rows that it had.",
        edits=(
            Edit(
                "keyshard/reading/replay.py",
                "        for block in blocks:\n"
                "            check_delivered(tp, wanted[tp].published_ms, block)\n",
                "",
            ),
        ),
        killers=(
            killer(
                "unit/test_replay",
                "test_other_entries_under_the_ids_of_the_batch_are_refused",
            ),
        ),
    ),
    Mutant(
        name="release a batch of a deleted topic that was forgotten",
        promise="A topic that is deleted ends nothing but itself.",
        edits=(
            Edit(
                "keyshard/core/window/window.py",
                "for tp, blocks in entries.items() if blocks}",
                "for tp, blocks in entries.items()}",
            ),
        ),
        killers=(
            killer(
                "unit/test_window",
                "test_a_deleted_partition_whose_planned_batch_is_lost_is_forgotten_before_its_release",
            ),
        ),
    ),
)
