"""Mutants of the wire transport's rules."""

from __future__ import annotations

from table import Edit, Mutant, killer

CONNECTION = "unit/test_wire_connection"
SUBSCRIBED = "keyshard/broker/wire/subscribed.py"

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
                SUBSCRIBED,
                "            self._used += messages\n",
                "            self._used += 2 * messages\n",
            ),
        ),
        killers=(killer(CONNECTION, "test_permits_are_given_back_as_entries_are_taken"),),
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
                "                handle = self._handles.pop(command.consumer_id, None)\n",
                "                handle = self._handles.get(command.consumer_id)\n",
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
                "        if not self._config.skips_corrupt:\n            raise error\n",
                "",
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
