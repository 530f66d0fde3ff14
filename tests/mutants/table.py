"""The mutants: keyshard with one promise broken, and the tests that must notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Edit:
    """One change of the source text."""

    file: str
    old: str
    """Stands exactly once in the file."""
    new: str


@dataclass(frozen=True, slots=True)
class Mutant:
    """One way to break a promise."""

    name: str
    promise: str
    """What it breaks."""
    edits: tuple[Edit, ...]
    killers: tuple[str, ...]
    """Tests, each of which must fail; they pass on the code as it is."""


def killer(file: str, *names: str) -> str:
    """A file of tests, or one test in it, as pytest names them."""
    return "::".join([f"tests/{file}.py", *names])


PARTITION_WINDOW = "keyshard/core/window/partition_window.py"
RESCALE = "keyshard/coordinator/rescale.py"
STREAM_READER = "spark_adapter/stream_reader.py"
ANY_ORDER = killer("property/test_window")
ASYNC_PROGRESS = killer(
    "unit/test_stream_reader", "test_async_progress_is_refused_with_nothing_acknowledged"
)
IN_THE_SIMULATION = killer(
    "simulation/test_handling", "test_keys_keep_their_order_through_retries_and_parking"
)

MUTANTS = (
    Mutant(
        name="acknowledge at the cut, before the commit log",
        promise="No loss: a message is acknowledged only after the checkpoint with it is durable.",
        edits=(
            Edit(
                "keyshard/coordinator/batches.py",
                "                full = self._window.pauses.any_full\n",
                "                full = self._window.pauses.any_full\n"
                "                batch = self._window.batches[checkpoint.batch_id]\n"
                "                for where, blocks in batch.entries.items():\n"
                "                    self._worker.acknowledge({where: [b.id for b in blocks]})\n",
            ),
        ),
        killers=(ASYNC_PROGRESS,),
    ),
    Mutant(
        name="acknowledge a planned batch before the host showed that it commits in time",
        promise="No loss: under async progress tracking nothing says what is durable.",
        edits=(
            Edit(
                STREAM_READER,
                "        self._commits_in_time = available_now\n",
                "        self._commits_in_time = True\n",
            ),
        ),
        killers=(ASYNC_PROGRESS,),
    ),
    Mutant(
        name="forget the delivered set at a restart",
        promise="Exactly once: what the broker delivers again is recognised and dropped.",
        edits=(
            Edit(
                "keyshard/coordinator/opening.py",
                "checkpoint.partitions if checkpoint else {},",
                "{},",
            ),
        ),
        killers=(
            killer(
                "runtime/test_coordinator",
                "test_committed_entries_that_come_again_are_dropped_and_acknowledged",
            ),
        ),
    ),
    Mutant(
        name="treat positions in a range as monotonic",
        promise="No loss: an entry below the newest delivered one may still have to be delivered.",
        edits=(
            Edit(
                "keyshard/core/position/checkpoint.py",
                "        return entry_id in self.delivered\n",
                "        last = self.delivered.last\n"
                "        return last is not None and entry_id <= last\n",
            ),
        ),
        killers=(
            killer(
                "unit/test_checkpoint",
                "test_settled_is_what_lies_at_or_below_the_floor_or_is_delivered",
            ),
            killer(
                "property/test_entry_set",
                "test_pruning_below_a_floor_settles_the_same_entries_and_those_below_it",
            ),
            ANY_ORDER,
        ),
    ),
    Mutant(
        name="nack in ordered mode",
        promise="Order: a message that is queued anew is overtaken by later ones of its key.",
        edits=(
            Edit(
                "keyshard/broker/pulsar/consumer.py",
                "        return to_blocks(messages, self._topic_partition, self._hash_range, ",
                "        for message in messages:\n"
                "            if message.redelivery_count() > 0:\n"
                "                self._raw.negative_acknowledge(message)\n"
                "        return to_blocks(messages, self._topic_partition, self._hash_range, ",
            ),
        ),
        killers=(
            killer(
                "unit/test_pulsar_client_calls",
                "test_a_message_that_comes_again_is_received_and_acknowledged_and_nothing_else",
            ),
        ),
    ),
    Mutant(
        name="options say where in a producer batch a stream begins, not its subscription",
        promise="Once: what a back-fill had up to a position does not come to the stream.",
        edits=(
            Edit(
                "keyshard/coordinator/starting.py",
                "    if admin is None:\n        return {}\n",
                "    if admin is None or not config.starting_position.startswith('{'):\n"
                "        return {}\n",
            ),
        ),
        killers=(
            killer(
                "runtime/test_start_positions",
                "test_a_run_that_died_before_its_first_checkpoint_begins_there_again",
            ),
        ),
    ),
    Mutant(
        name="default batching without the misroute alarm",
        promise="Order: what cannot be kept in order is counted and named.",
        edits=(
            Edit(
                "keyshard/worker/intake.py",
                "        if misrouted:\n"
                "            self._oddities.misrouted(owned_range, misrouted)\n",
                "",
            ),
        ),
        killers=(
            killer("runtime/test_coordinator", "test_a_misrouted_message_is_counted_and_warned_of"),
        ),
    ),
    Mutant(
        name="drop the tail of a chunk that ends inside an entry",
        promise="No loss: an entry is joined from all receives that bring parts of it.",
        edits=(
            Edit(
                "keyshard/worker/receiver.py",
                "                entries.extend("
                "range_consumer.assembly.add(block, after_gap=after_gap))\n",
                "                entries.extend("
                "range_consumer.assembly.add(block, after_gap=after_gap))\n"
                "            range_consumer.assembly.open = None\n",
            ),
        ),
        killers=(killer("unit/test_receiver", "test_only_whole_entries_are_delivered"),),
    ),
    Mutant(
        name="let two owners of a range overlap",
        promise="Order: each slot has one owner.",
        edits=(
            Edit(
                "keyshard/core/ring/hash_range.py",
                "-(-(i + 1) * RING_SIZE // count) - 1)",
                "min(RING_SIZE - 1, -(-(i + 1) * RING_SIZE // count)))",
            ),
        ),
        killers=(killer("unit/test_hash_range"),),
    ),
    Mutant(
        name="subscribe a range again before its old owner gave it back",
        promise="Order: each slot has one owner at any time.",
        edits=(
            Edit(
                "keyshard/worker/subscribe.py",
                "    close_quietly(range_consumer.consumer, for_another=True)\n\n    def attempt",
                "    def attempt",
            ),
        ),
        killers=(killer("unit/test_reopen_range_consumer"),),
    ),
    Mutant(
        name="skip a range in the cut for ever",
        promise="No idle range: whatever is received gets into a batch.",
        edits=(
            Edit(
                PARTITION_WINDOW,
                "        taken, rest = take_aligned(self.received[:count], limits, _sizes, "
                "self.left_out)\n",
                "        fitting = self.received[:count]\n"
                "        others = [one for one in fitting if one.received_by != 1]\n"
                "        taken, rest = take_aligned(others, limits, _sizes, self.left_out)\n"
                "        rest = sorted(rest + [one for one in fitting if one.received_by == 1],\n"
                "                      key=_id)\n",
            ),
        ),
        killers=(
            killer("unit/test_window", "test_a_range_left_out_of_one_cut_has_a_part_in_the_next"),
            ANY_ORDER,
        ),
    ),
    Mutant(
        name="give no turn to a range that the cut before left out",
        promise="No idle range: nothing with data is left out of two cuts in a row.",
        edits=(
            Edit(
                "keyshard/core/window/admission.py",
                "    waiting = left_out - {block.received_by for block in taken}\n",
                "    waiting: set[int] = set()\n",
            ),
        ),
        killers=(
            killer("unit/test_window", "test_a_range_left_out_of_one_cut_has_a_part_in_the_next"),
        ),
    ),
    Mutant(
        name="compute a batch as a difference after pruning",
        promise="Exactly once: a batch that runs again has the entries it was cut with.",
        edits=(
            Edit(
                PARTITION_WINDOW,
                "            batch=batch,\n",
                "            batch=(settled.delivered | batch) - self.state.delivered,\n",
            ),
        ),
        killers=(killer("unit/test_window_settling"), ANY_ORDER),
    ),
    Mutant(
        name="lay a re-run batch out by the running N",
        promise="Exactly once: a batch that runs again has the same rows in the same partitions.",
        edits=(
            Edit(
                "keyshard/core/window/window.py",
                "self.batches.add(checkpoint, {tp: list(blocks)",
                "self.batches.ranges = self.ranges\n"
                "        self.batches.add(checkpoint, {tp: list(blocks)",
            ),
            Edit(
                "keyshard/core/window/planned.py",
                "        self._planned: dict[str, PlannedBatch] = {}\n",
                "        self._planned: dict[str, PlannedBatch] = {}\n        self.ranges = 0\n",
            ),
            Edit(
                "keyshard/core/window/planned.py",
                "lay_out(entries, checkpoint.ranges, checkpoint.merged)",
                "lay_out(entries, self.ranges or checkpoint.ranges, checkpoint.merged)",
            ),
        ),
        killers=(killer("runtime/test_run_again"),),
    ),
    Mutant(
        name="deduplicate a half-received entry by its id",
        promise="No loss: an entry that a reconnect starts again replaces what was held of it.",
        edits=(
            Edit(
                "keyshard/core/position/assembly.py",
                "        if held is None or block.indices[0] <= held.indices[-1]:\n"
                "            self.open = held = block\n",
                "        if held is not None and block.indices[0] <= held.indices[-1]:\n"
                "            return done\n"
                "        if held is None:\n"
                "            self.open = held = block\n",
            ),
        ),
        killers=(
            killer("unit/test_assembly", "test_an_entry_that_starts_again_replaces_what_was_held"),
        ),
    ),
    Mutant(
        name="move a range while a handler works on it",
        promise="Order: the old owner's handlers end before the new owner's begin.",
        edits=(Edit(RESCALE, "                self._drain(began_s)\n", ""),),
        killers=(
            killer(
                "runtime/test_rescale_handlers",
                "test_a_handler_that_hangs_is_named_and_everything_goes_on",
            ),
        ),
    ),
    Mutant(
        name="leave a gap when ranges cannot change hands",
        promise="No silent stall: the ring is covered again, or the source ends with an error.",
        edits=(
            Edit(
                RESCALE,
                "Follows(done=Step.ADOPT, failed=Step.RESTORE)",
                "Follows(done=Step.ADOPT, failed=Step.KEPT)",
            ),
        ),
        killers=(
            killer(
                "runtime/test_rescale", "test_ranges_that_somebody_else_has_go_back_to_their_owners"
            ),
            killer("runtime/test_rescale", "test_a_gap_that_cannot_be_closed_ends_the_source"),
        ),
    ),
    Mutant(
        name="give new topic partitions the ranges of the start",
        promise="No loss: every slot of every topic partition has one owner.",
        edits=(
            Edit(
                "keyshard/worker/range_consumers.py",
                "self.subscribe(self.owned_ranges(found, self.assignment), start)",
                "self.subscribe(self.owned_ranges(found, assign(self._config.parallelism)), start)",
            ),
        ),
        killers=(
            killer(
                "runtime/test_rescale",
                "test_topic_partitions_that_come_have_the_current_assignment",
            ),
        ),
    ),
    Mutant(
        name="complete a parked message before its letter is confirmed",
        promise="No loss: what no handler got done is acknowledged when its letter is stored.",
        edits=(
            Edit(
                "keyshard/handlers/parked_lanes.py",
                "        self.letters.send(letter)\n        with self._run.changed:\n",
                "        with self._run.changed:\n"
                "            self._run.lanes.completed(work)\n"
                "        self.letters.send(letter)\n"
                "        if work.resting is None:\n"
                "            return\n"
                "        with self._run.changed:\n",
            ),
        ),
        killers=(
            killer(
                "runtime/test_parking",
                "test_nothing_is_acknowledged_while_its_letter_is_not_confirmed",
            ),
        ),
    ),
    Mutant(
        name="forget at a restart which keys are parked",
        promise="Order: a message does not overtake one of its key that rests as a dead letter.",
        edits=(
            Edit(
                "keyshard/dead_letter/opening.py",
                "return state, fold(broker, where, state, consumer, config)",
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
        killers=(killer("unit/test_lanes_replay"),),
    ),
    Mutant(
        name="overlook a handler that never returns while other keys go on",
        promise="No silent stall: a range that does not progress is named, with key and message.",
        edits=(
            Edit(
                "keyshard/core/health.py",
                "            and (running_s >= (STALL_S if key.parking else slow_s))\n",
                "            and running_s < 0\n",
            ),
        ),
        killers=(
            killer(
                "unit/test_health",
                "test_a_handler_that_does_not_return_is_named_though_other_keys_go_on",
            ),
        ),
    ),
    Mutant(
        name="acknowledge letters that rest when they come again",
        promise="No loss: a dead letter is kept until a handler got it done.",
        edits=(
            Edit(
                "keyshard/dead_letter/reading.py",
                "            and not state.rests(found.key, where, message_id)\n",
                "",
            ),
        ),
        killers=(
            killer(
                "runtime/test_letter_returns",
                "test_what_rests_and_what_nobody_replays_is_kept_though_it_comes_again",
            ),
        ),
    ),
    Mutant(
        name="acknowledge markers that a start finds before a checkpoint is stored behind them",
        promise="No false loss: what the stored checkpoint calls resting has its marker.",
        edits=(
            Edit(
                "keyshard/dead_letter/opening.py",
                "    letters.finished.markers(finished)\n",
                "    letters.finished.acknowledge(finished)\n",
            ),
        ),
        killers=(
            killer(
                "runtime/test_letter_returns",
                "test_markers_behind_the_stored_checkpoint_stay_until_the_next_is_stored",
            ),
        ),
    ),
    Mutant(
        name="forget after a restart that an older message ran behind done letters",
        promise="Order: what runs again does so with all that is newer, whoever is killed.",
        edits=(
            Edit(
                "keyshard/dead_letter/reading.py",
                "        state.run_again(position, found.key, found.topic_partition, "
                "found.message_id)\n",
                "        state.passed(position)\n",
            ),
        ),
        killers=(
            killer(
                "runtime/test_parking_repeats",
                "test_a_newer_letter_runs_behind_what_came_again_also_when_the_process_ends_"
                "between",
            ),
        ),
    ),
    Mutant(
        name="count a letter twice that a crash wrote twice",
        promise="Order: a message that a crash parked twice is replayed once, in its place.",
        edits=(
            Edit(
                "keyshard/core/dead_letter/parked.py",
                "            return False\n        parked.add",
                "            pass\n        parked.add",
            ),
        ),
        killers=(killer("unit/test_parking"), killer("property/test_parking")),
    ),
    Mutant(
        name="let what was handled run again behind the first letter of its key",
        promise="Order: what is older than the first dead letter of a key passes before it.",
        edits=(
            Edit(
                "keyshard/core/dead_letter/parking.py",
                "first is not None and message_id < first else",
                "False else",
            ),
            Edit(
                "keyshard/core/dead_letter/parked_key.py",
                "        return [self._letters[where].positions[next(sorted_ids[where])] for",
                "        if sorted_ids:\n"
                "            return [position for position, _ in written]\n"
                "        return [self._letters[where].positions[next(sorted_ids[where])] for",
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
        name="let newer messages of a parked key pass its letters",
        promise="Order: what follows a parked message waits behind it as a letter.",
        edits=(
            Edit(
                "keyshard/core/dead_letter/parking.py",
                "return Course.HANDLE if first is not None and message_id < first else "
                "Course.LETTER",
                "return Course.HANDLE",
            ),
        ),
        killers=(IN_THE_SIMULATION,),
    ),
)
