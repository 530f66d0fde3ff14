"""Mutants of the wire transport's rules."""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant, killer

RECEIVING = "unit/test_wire_receiving"
SUBSCRIBED = "keyshard/broker/wire/subscription.py"
PERMITS = "keyshard/broker/wire/permits.py"

OF_WIRE = (
    Mutant(
        name="believe each gap between two entries",
        promise="A reader misses no stored message if its cursor is moved by an expiry.",
        edits=(
            Edit(
                "keyshard/broker/wire/consumer.py",
                "        if marked < gap:\n            return len(entries)\n",
                "        if marked < gap or number == 0:\n            return len(entries)\n",
            ),
        ),
        killers=(
            killer("unit/test_wire_reader", "test_a_gap_that_the_cursor_has_reached_is_read_again"),
        ),
    ),
    Mutant(
        name="take a partition that the broker denies for a policy",
        promise="A source goes on if a partitioned topic is deleted.",
        edits=(
            Edit(
                "keyshard/broker/wire/errors.py",
                " or (code == _NOT_ALLOWED and denies_partition(said))",
                "",
            ),
        ),
        killers=(
            killer(
                "unit/test_wire_errors",
                "test_a_partition_that_newer_brokers_deny_is_missing_and_ends_no_source",
            ),
        ),
    ),
    Mutant(
        name="send the first permits before acknowledgements that waited",
        promise="What is acknowledged does not come again because a connection was lost.",
        edits=(
            Edit(
                SUBSCRIBED,
                "        self.subscribed_again(at, handle_id)\n        with self._changed:\n",
                "        with self._changed:\n",
            ),
        ),
        killers=(
            killer(
                "unit/test_wire_acknowledging",
                "test_a_lost_connection_drops_queued_entries_and_resends_acknowledgements",
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
        killers=(killer(RECEIVING, "test_permits_are_given_back_as_entries_are_taken"),),
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
                RECEIVING,
                "test_a_silent_broker_gets_a_limited_number_of_extra_permits",
            ),
        ),
    ),
    Mutant(
        name="lend a silent broker one more for ever",
        promise="However long nothing comes, the queue is exceeded by a few messages only.",
        edits=(Edit(PERMITS, "        if self._lent >= LENT_MAX:\n            return 0\n", ""),),
        killers=(
            killer("unit/test_wire_permits", "test_lent_permits_are_subtracted_from_used_ones"),
        ),
    ),
    Mutant(
        name="take what comes for a subscription that has ended",
        promise="What is late belongs to nobody: it comes again with the next subscription.",
        edits=(
            Edit(
                SUBSCRIBED,
                "            if handle_id != self._id or self._closed:\n",
                "            if self._closed:\n",
            ),
            Edit(
                "keyshard/broker/wire/connection.py",
                "        if (handle := self.unregister(handle_id)) is not None:\n",
                "        if (handle := self._handles.get(handle_id)) is not None:\n",
            ),
        ),
        killers=(killer(RECEIVING, "test_late_entries_of_an_ended_subscription_are_dropped"),),
    ),
    Mutant(
        name="forget the producer to close before the wait for a thread",
        promise="A closed producer gives its name back.",
        edits=(
            Edit(
                "keyshard/broker/wire/producer.py",
                "            yield leaving[0].address\n",
                "            self._leaving = None\n            yield leaving[0].address\n",
            ),
        ),
        killers=(
            killer(
                "unit/test_wire_producer",
                "test_a_producer_that_is_closed_while_it_is_reopened_gives_its_name_back",
            ),
        ),
    ),
    Mutant(
        name="wait for rows of an earlier attempt that the broker has lost",
        promise="A call stores rows that the broker lost, without its timeout.",
        edits=(
            Edit(
                "keyshard/broker/wire/producer.py",
                "DeduplicationError | BeginAgainError | ProducerFencedError)",
                "DeduplicationError | ProducerFencedError)",
            ),
        ),
        killers=(
            killer(
                "unit/test_wire_producer",
                "test_rows_of_an_earlier_attempt_that_the_broker_has_lost_end_the_producer_at_once",
            ),
        ),
    ),
    Mutant(
        name="skip a corrupt entry that nobody chose to skip",
        promise="Nothing is acknowledged that no batch holds, unless the user says so.",
        edits=(
            Edit(
                "keyshard/consumers/intake.py",
                "        if not isinstance(error, self._config.skipped):\n",
                "        if isinstance(error, type(None)):\n",
            ),
        ),
        killers=(
            killer(
                "runtime/test_corrupt",
                "test_a_corrupt_entry_ends_the_source_by_default_and_is_not_acknowledged",
            ),
        ),
    ),
    Mutant(
        name="leave open what a broker opens after it was given up",
        promise="A handle whose request was not answered in time does not stay open.",
        edits=(
            Edit(
                "keyshard/broker/wire/requests.py",
                "                undo()\n",
                "                pass\n",
            ),
        ),
        killers=(
            killer(
                "unit/test_wire_producer", "test_a_request_without_an_answer_gives_its_name_back"
            ),
            killer(
                "unit/test_wire_connection",
                "test_a_consumer_that_a_frozen_broker_makes_after_its_end_is_closed_again",
            ),
        ),
    ),
    Mutant(
        name="try first the consumer that failed just now",
        promise="No stall: a consumer that cannot be subscribed delays others by one attempt.",
        edits=(
            Edit(
                "keyshard/consumers/reconnector.py",
                "        return sorted(long, key=lambda one: one.replace_at_s)\n",
                "        return long\n",
            ),
        ),
        killers=(
            killer(
                "runtime/test_reconnector",
                "test_topic_partitions_that_cannot_be_subscribed_hold_up_no_other_and_name_no_other",
            ),
        ),
    ),
    Mutant(
        name="give up when the admin interface asks to be slower",
        promise="A source waits for a broker that cannot answer now.",
        edits=(
            Edit(
                "keyshard/broker/admin/rest_format.py",
                " or status in _BUSY or moving\n",
                " or moving\n",
            ),
        ),
        killers=(
            killer(
                "unit/test_admin_http",
                "test_a_broker_that_cannot_answer_now_may_be_asked_again",
            ),
        ),
    ),
)
