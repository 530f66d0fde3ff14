"""Mutants of what is between a source and its worker processes."""

from __future__ import annotations

from table import Edit, Mutant, killer

HOSTED = "unit/test_hosted"
HOST = "keyshard/broker/hosted/host.py"

OF_WORKERS = (
    Mutant(
        name="let a worker act after its lease has ended",
        promise="A worker that wakes neither gives nor acknowledges anything of before.",
        edits=(
            Edit(
                "keyshard/broker/hosted/process.py",
                "        if not self.lease.asked():\n",
                "        if not self.lease.asked() and not token:\n",
            ),
        ),
        killers=(
            killer(HOSTED, "test_a_worker_whose_lease_has_ended_neither_gives_nor_acknowledges"),
        ),
    ),
    Mutant(
        name="give the next answer to a question that comes twice",
        promise="No loss: what crosses may be asked for again.",
        edits=(Edit(HOST, "            if seq == self._answered:\n", "            if seq < 0:\n"),),
        killers=(killer(HOSTED, "test_the_same_question_has_the_same_answer_and_a_late_one_none"),),
    ),
    Mutant(
        name="subscribe again what is asked for twice",
        promise="No stall: no worker holds a range that nobody knows of.",
        edits=(
            Edit(
                HOST,
                "            if number in self._hosted or number in self._closed:\n",
                "            if number in self._closed:\n",
            ),
        ),
        killers=(killer(HOSTED, "test_a_subscription_that_is_asked_for_twice_at_once_is_one"),),
    ),
    Mutant(
        name="wait for the end of a question where a consumer has room again",
        promise="No stall: a full consumer goes on as soon as enough of it was taken.",
        edits=(
            Edit(
                HOST, "                    if self._full:\n", "                    if not self:\n"
            ),
        ),
        killers=(
            killer(HOSTED, "test_who_has_room_again_does_not_wait_for_the_end_of_a_question"),
        ),
    ),
    Mutant(
        name="acknowledge through any worker",
        promise="The backlog becomes empty: a lost acknowledgement is made again.",
        edits=(
            Edit(
                "keyshard/broker/hosted/consumer.py",
                "holder if holder.is_connected() else other",
                "other",
            ),
        ),
        killers=(
            killer(
                HOSTED, "test_an_acknowledgement_goes_through_the_worker_that_the_entry_came_by"
            ),
        ),
    ),
)
