"""Mutants of the wire transport's rules."""

from __future__ import annotations

from table import Edit, Mutant, killer

CONNECTION = "unit/test_wire_connection"
SUBSCRIBED = "keyshard/broker/wire/subscribed.py"
PERMITS = "keyshard/broker/wire/permits.py"

OF_WIRE = (
    Mutant(
        name="send the first permits before acknowledgements that waited",
        promise="What is acknowledged does not come again because a connection was lost.",
        edits=(
            Edit(
                SUBSCRIBED,
                "        self.subscribed_again(at, consumer_id)\n        with self._changed:\n",
                "        with self._changed:\n",
            ),
        ),
        killers=(
            killer(
                CONNECTION,
                "test_what_came_before_a_cut_is_forgotten_and_acknowledgements_are_sent_after_it",
            ),
        ),
    ),
    Mutant(
        name="give back more permits than were used",
        promise="No more comes than the queue holds, however slow its consumer is.",
        edits=(
            Edit(
                PERMITS,
                "        self._used = self.ahead - held\n",
                "        self._used = self.ahead - held + messages\n",
            ),
        ),
        killers=(killer(CONNECTION, "test_permits_are_given_back_as_entries_are_taken"),),
    ),
    Mutant(
        name="leave a broker parked that sent something",
        promise="A broker that leaves what is to be sent again is given a word.",
        edits=(
            Edit(
                "keyshard/broker/wire/consumer.py",
                "        super().used(messages, entries, ahead_max)\n        self._watch()\n",
                "        super().used(messages, entries, ahead_max)\n",
            ),
        ),
        killers=(
            killer(
                CONNECTION,
                "test_a_broker_that_sends_nothing_is_given_a_word_now_and_then_and_no_more_for_it",
            ),
        ),
    ),
    Mutant(
        name="lend a silent broker one more for ever",
        promise="However long nothing comes, the queue is exceeded by a few messages only.",
        edits=(Edit(PERMITS, "        if self._lent >= LENT_MAX:\n            return 0\n", ""),),
        killers=(
            killer("unit/test_wire_permits", "test_what_was_lent_is_subtracted_from_what_is_used"),
        ),
    ),
    Mutant(
        name="take what comes for a subscription that has ended",
        promise="What is late belongs to nobody: it comes again with the next subscription.",
        edits=(
            Edit(
                SUBSCRIBED,
                "            if consumer_id != self._id or self._closed:\n",
                "            if self._closed:\n",
            ),
            Edit(
                "keyshard/broker/wire/connection.py",
                "            handle = self._taken_off(command.consumer_id)\n",
                "            handle = self._handles.get(command.consumer_id)\n",
            ),
        ),
        killers=(killer(CONNECTION, "test_what_is_late_for_a_subscription_is_for_nobody"),),
    ),
    Mutant(
        name="skip a corrupt entry that nobody chose to skip",
        promise="Nothing is acknowledged that no batch holds, unless the user says so.",
        edits=(
            Edit(
                "keyshard/worker/intake.py",
                "        if not isinstance(error, self._config.skipped):\n",
                "        if isinstance(error, type(None)):\n",
            ),
        ),
        killers=(
            killer(
                "runtime/test_corrupt",
                "test_without_a_word_a_source_ends_before_one_and_acknowledges_nothing",
            ),
        ),
    ),
)
