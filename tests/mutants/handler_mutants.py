"""Mutants of handlers: order per key, retries, parked keys, dead letters."""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant, killer

REQUESTS = "keyshard/observe/dead_letter_requests.py"
COMMANDS = "runtime/test_dead_letter_commands"
IN_THE_SIMULATION = killer(
    "simulation/test_handling", "test_keys_keep_their_order_through_retries_and_parking"
)

OF_HANDLERS = (
    Mutant(
        name="receive although the source is paused",
        promise="A paused source receives nothing until it is resumed.",
        edits=(
            Edit(
                "keyshard/consumers/intake.py",
                "            self.paused\n            or (ahead_max",
                "            (ahead_max",
            ),
        ),
        killers=(
            killer("runtime/test_pause", "test_a_paused_source_receives_nothing_and_loses_nothing"),
        ),
    ),
    Mutant(
        name="take a function for an observer",
        promise="A wrong argument is refused before anything starts.",
        edits=(
            Edit(
                "keyshard/handlers/outcomes.py",
                "        hasattr(one, name) for one in given for name in methods\n",
                "        one for one in given for _ in methods\n",
            ),
        ),
        killers=(
            killer(
                "unit/test_hostile_options",
                "test_calls_of_a_source_refuse_unexpected_values",
            ),
        ),
    ),
    Mutant(
        name="complete a parked message before its dead letter is confirmed",
        promise="No loss: what no handler got done is acknowledged when its dead letter is stored.",
        edits=(
            Edit(
                "keyshard/handlers/failed_messages.py",
                "        self.dead_letters.send(dead_letter)\n        with self._run.changed:\n",
                "        with self._run.changed:\n"
                "            self._run.lanes.completed(work)\n"
                "        self.dead_letters.send(dead_letter)\n"
                "        if work.resting is None:\n"
                "            return\n"
                "        with self._run.changed:\n",
            ),
        ),
        killers=(
            killer(
                "runtime/test_parking",
                "test_nothing_is_acknowledged_while_its_dead_letter_is_not_confirmed",
            ),
        ),
    ),
    Mutant(
        name="keep a key parked that has no dead letter any more",
        promise="A key is released when the last of its dead letters is discarded.",
        edits=(
            Edit(
                "keyshard/handlers/failed_messages.py",
                "                self._emptied(work.queue.key)\n",
                "",
            ),
        ),
        killers=(
            killer(
                "runtime/test_discarding",
                "test_a_key_is_unparked_if_its_last_dead_letter_is_discarded_at_its_confirmation",
            ),
        ),
    ),
    Mutant(
        name="unpark a key while its dead letters are discarded",
        promise="Order: no message of a key runs beside a replay of the key.",
        edits=(
            Edit(
                "keyshard/handlers/failed_messages.py",
                "with self._alone(), self._run.changed:",
                "with self._run.changed:",
            ),
        ),
        killers=(
            killer(
                "runtime/test_discarding",
                "test_a_key_is_unparked_after_its_dead_letters_are_discarded_not_meanwhile",
            ),
        ),
    ),
    Mutant(
        name="forget at a restart which keys are parked",
        promise="Order: a message does not overtake one of its key that rests as a dead letter.",
        edits=(
            Edit(
                "keyshard/dead_letters/startup.py",
                "return state, fold(broker, where, state, consumer, config, check=check_source)",
                "return state, []",
            ),
        ),
        killers=(
            killer("runtime/test_dead_letters", "test_nothing_parked_is_lost_with_the_process"),
        ),
    ),
    Mutant(
        name="let newer messages of a key overtake its replay",
        promise="Order: dead letters of a key are replayed before its newer messages are handled.",
        edits=(
            Edit(
                "keyshard/core/lanes/lanes.py",
                "        queue.work.appendleft(",
                "        queue.work.append(",
            ),
        ),
        killers=(killer("unit/test_lanes"),),
    ),
    Mutant(
        name="overlook a handler that never returns while other keys go on",
        promise="No silent stall: a range that does not progress is named, with key and message.",
        edits=(
            Edit(
                "keyshard/core/range_watchdog.py",
                "            and running_s >= "
                "(STALL_S if key.parking or key.publishing else slow_s)\n",
                "            and running_s < 0\n",
            ),
        ),
        killers=(
            killer(
                "unit/test_range_watchdog",
                "test_a_handler_that_does_not_return_is_named_though_other_keys_continue",
            ),
        ),
    ),
    Mutant(
        name="take a broker that delivers nothing for one without entries",
        promise="A stall is named, also if the broker is its cause.",
        edits=(
            Edit(
                "keyshard/core/partition_watchdog.py",
                "due = state.backlog > delayed and",
                "due = state.backlog < delayed and",
            ),
        ),
        killers=(
            killer(
                "unit/test_partition_watchdog", "test_a_topic_partition_is_stalled_after_a_while"
            ),
        ),
    ),
    Mutant(
        name="acknowledge dead letters that rest when they come again",
        promise="No loss: a dead letter is kept until a handler got it done.",
        edits=(
            Edit(
                "keyshard/dead_letters/topic_scan.py",
                "            and not state.rests(found.key, where, message_id)\n",
                "",
            ),
        ),
        killers=(
            killer(
                "runtime/test_dead_letter_redelivery",
                "test_resting_dead_letters_are_kept_though_they_are_redelivered",
            ),
        ),
    ),
    Mutant(
        name="acknowledge markers that a start finds before a checkpoint is stored behind them",
        promise="No false loss: what the stored checkpoint calls resting has its marker.",
        edits=(
            Edit(
                "keyshard/dead_letters/startup.py",
                "    dead_letters.finished.markers(finished)\n",
                "    dead_letters.finished.acknowledge(finished)\n",
            ),
        ),
        killers=(
            killer(
                "runtime/test_dead_letter_redelivery",
                "test_markers_behind_the_stored_checkpoint_stay_until_the_next_is_stored",
            ),
        ),
    ),
    Mutant(
        name="forget after a restart that an older message ran behind done dead letters",
        promise="Order: what runs again does so with all that is newer, whoever is killed.",
        edits=(
            Edit(
                "keyshard/dead_letters/topic_scan.py",
                "        state.run_again(position, found.key, found.topic_partition, "
                "found.message_id)\n",
                "        state.passed(position)\n",
            ),
        ),
        killers=(
            killer(
                "runtime/test_parked_redelivery",
                "test_a_newer_dead_letter_runs_behind_a_redelivery_also_after_a_restart",
            ),
        ),
    ),
    Mutant(
        name="count a dead letter twice that a crash wrote twice",
        promise="Order: a message that a crash parked twice is replayed once, in its place.",
        edits=(
            Edit(
                "keyshard/dead_letters/topic_state.py",
                "            return False\n        parked.add",
                "            pass\n        parked.add",
            ),
        ),
        killers=(killer("unit/test_parking"), killer("property/test_parking")),
    ),
    Mutant(
        name="let what was handled run again behind the first dead letter of its key",
        promise="Order: what is older than the first dead letter of a key passes before it.",
        edits=(
            Edit(
                "keyshard/dead_letters/parking.py",
                "parked.begins_after(where, message_id) else",
                "False else",
            ),
            Edit(
                "keyshard/dead_letters/parked_key.py",
                "iter(sorted(found))",
                "iter(found)",
            ),
        ),
        killers=(killer("unit/test_parking"), killer("property/test_parking")),
    ),
    Mutant(
        name="hand out the newest message of a key behind the one that runs",
        promise="Order: messages of a key reach the handler in their order, also after retries.",
        edits=(
            Edit(
                "keyshard/core/lanes/lanes.py",
                "            queue.work.append(work)\n",
                "            queue.work.insert(min(1, len(queue.work)), work)\n",
            ),
        ),
        killers=(IN_THE_SIMULATION,),
    ),
    Mutant(
        name="complete the message that runs when its bulk is taken apart",
        promise="No loss: a message whose handler fails is not acknowledged.",
        edits=(
            Edit(
                "keyshard/core/lanes/bulk.py",
                "        done = max(0, begun - 1)\n",
                "        done = begun\n",
            ),
        ),
        killers=(
            killer(
                "property/test_bulk",
                "test_a_bulk_that_is_taken_apart_completes_only_done_entries",
            ),
        ),
    ),
    Mutant(
        name="begin a bulk while a message is in a lane",
        promise="Order: one handler per key at a time, also in bulk.",
        edits=(
            Edit(
                "keyshard/core/lanes/bulk.py",
                " or not self._entries or not self._lanes.empty:",
                " or not self._entries:",
            ),
        ),
        killers=(killer("property/test_bulk", "test_no_bulk_starts_while_a_message_is_in_a_lane"),),
    ),
    Mutant(
        name="let newer messages of a parked key pass its dead letters",
        promise="Order: what follows a parked message waits behind it as a dead letter.",
        edits=(
            Edit(
                "keyshard/dead_letters/parking.py",
                "return Action.HANDLE if parked.begins_after(where, message_id) else "
                "Action.DEAD_LETTER",
                "return Action.HANDLE",
            ),
        ),
        killers=(IN_THE_SIMULATION,),
    ),
    Mutant(
        name="forget at a restart a dead letter that is done and whose original is not committed",
        promise="Twice: what was replayed does not run again when its original comes again.",
        edits=(
            Edit(
                "keyshard/dead_letters/topic_state.py",
                "            begin = min(begin, done)\n",
                "            pass\n",
            ),
        ),
        killers=(
            killer("unit/test_parking"),
            killer(
                "runtime/test_parked_redelivery",
                "test_a_start_knows_a_done_dead_letter_until_its_original_is_in_a_checkpoint",
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
            killer(
                "runtime/test_batches",
                "test_the_source_waits_for_an_ack_in_progress_before_it_ends",
            ),
        ),
    ),
    Mutant(
        name="discard all dead letters of a key of which some match",
        promise="No loss: a discard takes only the dead letters that match.",
        edits=(
            Edit(
                "keyshard/dead_letters/store.py",
                "if len(found) == parked.count:",
                "if found:",
            ),
        ),
        killers=(
            killer(
                "property/test_dead_letter_filter",
                "test_a_discard_removes_the_listed_dead_letters_and_the_others_keep_their_order",
            ),
        ),
    ),
    Mutant(
        name="list dead letters that are done",
        promise="A list shows what a replay runs and a discard takes.",
        edits=(
            Edit(
                "keyshard/dead_letters/browser.py",
                "found.topic_partition, at) != position:",
                "found.topic_partition, at) is position:",
            ),
        ),
        killers=(
            killer("runtime/test_dead_letter_browser", "test_done_dead_letters_are_not_listed"),
        ),
    ),
    Mutant(
        name="ignore a condition beside another one",
        promise="Conditions combine: a dead letter matches if it fulfils each of them.",
        edits=(
            Edit(
                "keyshard/core/dead_letter_filter.py",
                "            and self.error in (None, dead_letter.error_kind)\n",
                "            and (self.topic is not None or self.error in (None, "
                "dead_letter.error_kind))\n",
            ),
        ),
        killers=(
            killer(
                "property/test_dead_letter_filter",
                "test_combined_conditions_select_the_common_dead_letters",
            ),
        ),
    ),
    Mutant(
        name="discard dead letters although dry_run is no truth value",
        promise="A request with a wrong or unknown field changes nothing.",
        edits=(Edit(REQUESTS, '    check_bool("dry_run", value)\n', ""),),
        killers=(killer(COMMANDS, "test_a_request_with_a_wrong_or_unknown_field_changes_nothing"),),
    ),
    Mutant(
        name="ignore unknown conditions of dead letters",
        promise="A request with a wrong or unknown field changes nothing.",
        edits=(
            Edit(
                REQUESTS,
                "    check_names(f\"The request {request.get('do')}\", "
                'request, ["do", *others, *names])\n',
                "",
            ),
        ),
        killers=(killer(COMMANDS, "test_a_request_with_a_wrong_or_unknown_field_changes_nothing"),),
    ),
    Mutant(
        name="look at all marked dead letters for each message",
        promise="A message that is sent during a large discard does not hold up the handlers.",
        edits=(
            Edit(
                "keyshard/dead_letters/topic_state.py",
                "        while self._marked and not self._marking:\n",
                "        while self._marked:\n",
            ),
        ),
        killers=(
            killer(
                "unit/test_parking",
                "test_a_message_that_is_sent_during_a_discard_examines_its_dead_letters_once",
            ),
        ),
    ),
    Mutant(
        name="take an outage at the end of a run for its error",
        promise="A stop is no error although the broker is away, and an error stays what it was.",
        edits=(
            Edit(
                "keyshard/dead_letters/store.py",
                "except BrokerError as exc:  # noqa: PERF203",
                "except ZeroDivisionError as exc:  # noqa: PERF203",
            ),
        ),
        killers=(
            killer("runtime/test_parking", "test_an_outage_at_the_end_is_no_error_and_hides_none"),
        ),
    ),
)
