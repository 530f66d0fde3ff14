"""Mutants of the protocol between a source and its worker processes."""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant, killer

HOSTED = "unit/test_worker_consumers"
REMOTE = "unit/test_remote_consumer"
SERVER = "unit/test_worker_server"
HOSTING = "unit/test_worker_supervisor"
HOST = "keyshard/workers/host.py"
SUPERVISOR = "keyshard/workers/supervisor.py"

OF_WORKERS = (
    Mutant(
        name="let a worker act after its lease has ended",
        promise="A worker that wakes neither gives nor acknowledges anything of before.",
        edits=(
            Edit(
                "keyshard/workers/server.py",
                "        if not self.lease.renew():\n",
                "        if not self.lease.renew() and not token:\n",
            ),
        ),
        killers=(
            killer(SERVER, "test_a_worker_whose_lease_has_ended_neither_gives_nor_acknowledges"),
        ),
    ),
    Mutant(
        name="let a replacement begin with one permit",
        promise="No stall: new messages come soon after a worker was killed.",
        edits=(
            Edit(
                SUPERVISOR,
                "            message_bytes=spec.message_bytes,\n",
                "            message_bytes=None,\n",
            ),
        ),
        killers=(killer(HOSTING, "test_a_replacement_knows_the_size_of_the_messages"),),
    ),
    Mutant(
        name="let a worker of another version begin",
        promise="Two versions that work together are refused, not found out by what they do.",
        edits=(
            Edit(
                "keyshard/workers/server.py",
                "        if version != VERSION:\n",
                "        if version == VERSION != VERSION:\n",
            ),
        ),
        killers=(killer(SERVER, "test_a_worker_of_another_version_is_refused_by_name"),),
    ),
    Mutant(
        name="give the next answer to a question that comes twice",
        promise="No loss: what crosses may be asked for again.",
        edits=(Edit(HOST, "            if seq == self._answered:\n", "            if seq < 0:\n"),),
        killers=(
            killer(HOSTED, "test_a_repeated_request_has_the_same_answer_and_a_late_one_none"),
        ),
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
        edits=(Edit(HOST, "                if self._full:\n", "                if not self:\n"),),
        killers=(killer(HOSTED, "test_a_consumer_with_room_again_does_not_wait_for_a_request"),),
    ),
    Mutant(
        name="take the silence of a worker for the end of an entry",
        promise="No loss: a worker that stands still has what came to it, and tells nothing.",
        edits=(
            Edit(
                "keyshard/workers/consumer.py",
                "        return self._gave_all and self.is_connected()\n",
                "        return self.is_connected()\n",
            ),
        ),
        killers=(
            killer(
                REMOTE,
                "test_a_consumer_has_given_all_by_the_report_of_its_worker_not_by_silence",
            ),
        ),
    ),
    Mutant(
        name="acknowledge through any worker",
        promise="The backlog becomes empty: a lost acknowledgement is made again.",
        edits=(
            Edit(
                "keyshard/workers/consumer.py",
                "other if holder is None or not holder.is_connected() else holder",
                "other",
            ),
        ),
        killers=(
            killer(
                REMOTE, "test_an_acknowledgement_goes_through_the_worker_that_the_entry_came_by"
            ),
        ),
    ),
    Mutant(
        name="answer a question with the proof of another token",
        promise="A worker answers its own source only.",
        edits=(
            Edit(
                "keyshard/workers/authentication.py",
                "        if not hmac.compare_digest(expected.encode(), proof.encode()):\n",
                "        if not proof:\n",
            ),
        ),
        killers=(
            killer(SERVER, "test_a_request_without_the_token_is_refused_unread_and_logged_once"),
        ),
    ),
    Mutant(
        name="answer a question that is late",
        promise="No loss: an answer that nobody waits for takes nothing away.",
        edits=(
            Edit(
                HOST,
                "            if seq != self._answered + 1:\n",
                "            if seq > self._answered + 1:\n",
            ),
        ),
        killers=(
            killer(HOSTED, "test_a_repeated_request_has_the_same_answer_and_a_late_one_none"),
        ),
    ),
    Mutant(
        name="open a consumer again that was closed",
        promise="No stall: a question that is late opens none again.",
        edits=(
            Edit(
                HOST,
                "            if number in self._hosted or number in self._closed:\n",
                "            if number in self._hosted:\n",
            ),
        ),
        killers=(killer(HOSTED, "test_a_subscription_that_is_asked_for_twice_at_once_is_one"),),
    ),
    Mutant(
        name="give the end of an entry whose beginning went with a connection",
        promise="No loss: what a client kept from before comes again, whole.",
        edits=(Edit(HOST, "            elif connected:\n", "            elif blocks:\n"),),
        killers=(
            killer(
                HOSTED,
                "test_the_end_of_an_entry_is_not_given_when_its_beginning_went_with_a_connection",
            ),
        ),
    ),
    Mutant(
        name="give the ranges of a worker away that is not ended",
        promise="No overlap: a worker is ended, or its lease is, before another has its ranges.",
        edits=(
            Edit(
                SUPERVISOR,
                "        worker.end(0.0)\n        with self._lock:\n",
                "        with self._lock:\n",
            ),
        ),
        killers=(
            killer(
                HOSTING,
                "test_a_worker_that_is_given_up_is_ended_before_another_one_has_its_ranges",
            ),
        ),
    ),
    Mutant(
        name="keep the number of a consumer in the next worker",
        promise="What is said under an old number counts for nobody.",
        edits=(
            Edit(
                SUPERVISOR,
                "            consumer.regaining(next(_numbers))\n",
                "            consumer.regaining(consumer.number)\n",
            ),
        ),
        killers=(
            killer(
                HOSTING,
                "test_no_number_is_given_twice_and_reports_under_an_old_one_are_dropped",
            ),
        ),
    ),
    Mutant(
        name="leave a consumer with the next worker that nobody knows of",
        promise="No stall: no worker holds a range that nobody knows of.",
        edits=(
            Edit(
                SUPERVISOR,
                "            consumer.ended()\n            self._forget(consumer)\n",
                "            self._forget(consumer)\n            raise\n",
            ),
        ),
        killers=(
            killer(
                HOSTING,
                "test_a_consumer_whose_worker_dies_while_subscribing_is_not_held_by_the_next",
            ),
        ),
    ),
)
