"""Mutants of lanes: retries beside other keys, moves of ranges, how much is taken."""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant, killer

LANES = "keyshard/core/lanes/lanes.py"
CIRCUIT = "keyshard/core/lanes/circuit_breaker.py"
FEEDER = "keyshard/handlers/lane_feeder.py"

ANSWER = "def {}(self) -> bool:\n        return {}\n"
NEED_OF_LANES = "            starving, hungry = lanes.starving, lanes.hungry\n"

OF_LANES = (
    Mutant(
        name="retry failed keys before keys that wait",
        promise="A retry delays no other key.",
        edits=(
            Edit(
                LANES,
                "if not failed or (ready and (untried_first or ready[0] < failed[0])):",
                "if not failed:",
            ),
        ),
        killers=(
            killer(
                "unit/test_lanes",
                "test_a_retry_comes_after_the_keys_that_wait_and_before_newer_ones",
            ),
        ),
    ),
    Mutant(
        name="retry a failed key at the place of its message",
        promise="A retry delays no other key.",
        edits=(
            Edit(
                LANES,
                "            queue.attempts += 1\n        queue.behind = self._received\n",
                "            queue.attempts += 1\n",
            ),
        ),
        killers=(
            killer(
                "unit/test_lanes",
                "test_a_retry_comes_after_the_keys_that_wait_and_before_newer_ones",
            ),
        ),
    ),
    Mutant(
        name="keep the lane of a key that waits for its retry",
        promise="While a key waits for its retry, its lane handles other keys.",
        edits=(
            Edit(
                LANES,
                "if owner.running >= lanes or not (ready or failed):",
                "if owner.running + len(self._later.heap) >= lanes or not (ready or failed):",
            ),
        ),
        killers=(
            killer(
                "unit/test_lanes",
                "test_a_key_that_waits_for_its_retry_leaves_its_lane_to_others",
            ),
        ),
    ),
    Mutant(
        name="move a range while its messages run",
        promise="Order: a key moves to another range when none of its messages runs.",
        edits=(
            Edit(
                LANES,
                "return [work for work in self.running.values() if work.message.slot in self.held]",
                "return []",
            ),
        ),
        killers=(
            killer("unit/test_lanes", "test_only_running_messages_of_held_slots_block_a_move"),
        ),
    ),
    Mutant(
        name="wait in a stop for the retry of a dead letter",
        promise="A stop does not wait for dead letters whose replay waits for a retry.",
        edits=(Edit(LANES, "stays = self._draining and work.entry is None", "stays = False"),),
        killers=(
            killer(
                "unit/test_lanes",
                "test_a_drain_does_not_wait_for_the_retry_of_a_dead_letter_that_fails_meanwhile",
            ),
        ),
    ),
    Mutant(
        name="take a key that fails beside others for an outage",
        promise="A key whose message keeps failing is parked while other keys succeed.",
        edits=(
            Edit(
                CIRCUIT,
                "refuted = first_s is not None and first_s < self._worked_s",
                "refuted = False",
            ),
        ),
        killers=(
            killer("unit/test_circuit_breaker", "test_bad_keys_among_good_ones_open_nothing"),
        ),
    ),
    *(
        Mutant(
            name=f"say that lanes are {'' if answer else 'not '}{noun}",
            promise=promise,
            edits=(Edit(LANES, f"def {noun}(self) -> bool:\n", ANSWER.format(noun, answer)),),
            killers=(killer("property/test_lanes", test),),
        )
        for noun, promise, test in (
            (
                "hungry",
                "Messages are taken while lanes may run dry, and no others.",
                "test_a_range_is_hungry_while_its_lanes_could_run_dry",
            ),
            (
                "starving",
                "A lane without work gets messages at once.",
                "test_a_range_starves_while_a_lane_has_nothing_to_do",
            ),
        )
        for answer in (True, False)
    ),
    *(
        Mutant(
            name=name,
            promise=promise,
            edits=(Edit(FEEDER, NEED_OF_LANES, f"            starving, hungry = {needs}\n"),),
            killers=(killer("unit/test_lane_feeder", test),),
        )
        for name, promise, needs, test in (
            (
                "take messages only for those that are done",
                "A lane without work gets messages at once.",
                "False, lanes.hungry",
                "test_a_turn_takes_many_rows_while_a_lane_has_nothing_to_do",
            ),
            (
                "take many messages although every lane has work",
                "Handlers get the interpreter while every lane has work.",
                "True, lanes.hungry",
                "test_while_every_lane_has_work_a_turn_takes_rows_for_the_completed_messages",
            ),
            (
                "take messages although many keys are ready",
                "Bounded: no more messages wait in the lanes than these need.",
                "lanes.starving, True",
                "test_a_turn_takes_no_rows_while_many_keys_are_ready",
            ),
            (
                "take no messages for lanes that may run dry",
                "Messages are taken while lanes may run dry.",
                "lanes.starving, False",
                "test_while_every_lane_has_work_a_turn_takes_rows_for_the_completed_messages",
            ),
        )
    ),
)
