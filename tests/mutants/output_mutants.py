"""Mutants of the rules by which outputs of handlers are stored once (ADR 0035)."""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant, killer

RUN = "keyshard/handlers/run.py"
LOG = "keyshard/handlers/output_log.py"
LOGGED = "keyshard/handlers/logged_outputs.py"
TESTS = "runtime/test_output_log"

OF_OUTPUTS = (
    Mutant(
        name="publish outputs before their checkpoint is durable",
        promise="What a handler attempt produced is sent only if the checkpoint has it.",
        edits=(
            Edit(
                RUN,
                "            self._committer.save(self._logged.prepared(planned, done_apart))\n"
                "            self._logged.publish()\n",
                "            outputs = self._logged.prepared(planned, done_apart)\n"
                "            self._logged.publish()\n"
                "            self._committer.save(outputs)\n",
            ),
        ),
        killers=(
            killer(
                TESTS,
                "test_outputs_are_published_after_the_checkpoint_and_acknowledged_after_confirmation",
            ),
        ),
    ),
    Mutant(
        name="forget rejected messages of an entry that is not complete",
        promise="Order: a restart repeats no message after newer ones of its key.",
        edits=(
            Edit(
                LOGGED,
                "[*self._begun.done, *done_apart]",
                "self._begun.done",
            ),
        ),
        killers=(
            killer(TESTS, "test_a_restart_rejects_no_message_again_after_newer_ones_of_its_key"),
        ),
    ),
    Mutant(
        name="acknowledge messages whose outputs are not confirmed",
        promise="An entry is acknowledged after the outputs of its messages are confirmed.",
        edits=(
            Edit(
                LOGGED,
                "        if not self._saved or self.log.unconfirmed:\n",
                "        if not self._saved:\n",
            ),
        ),
        killers=(
            killer(TESTS, "test_a_stop_before_the_confirmation_leaves_the_batch_to_the_next_start"),
        ),
    ),
    Mutant(
        name="forget handled messages of an entry that is not complete",
        promise="A message whose outputs are published is not handled again.",
        edits=(
            Edit(
                LOG,
                "        note(self.handled, done)\n",
                "",
            ),
        ),
        killers=(
            killer(TESTS, "test_handled_messages_of_an_unfinished_entry_are_not_handled_again"),
        ),
    ),
    Mutant(
        name="start without the outputs of the checkpoint",
        promise="A start publishes the batch of its checkpoint, which may not be stored.",
        edits=(
            Edit(
                LOG,
                "        self._batch = [self._restored(*item) for item in "
                "self._outputs.topics.items()]\n",
                "",
            ),
        ),
        killers=(
            killer(TESTS, "test_a_start_publishes_the_batch_of_its_checkpoint_that_was_never_sent"),
        ),
    ),
    Mutant(
        name="distribute the outputs of a checkpoint by the options of the sink",
        promise="A batch in a checkpoint keeps the hashing scheme that it began with.",
        edits=(
            Edit(
                LOG,
                "        return _TopicBatch(topic, stored.partitions, rows, stored.scheme)\n",
                "        return _TopicBatch(\n"
                "            topic, stored.partitions, rows, self._sink.hashing_scheme\n"
                "        )\n",
            ),
        ),
        killers=(killer(TESTS, "test_outputs_of_an_unfinished_batch_keep_their_hashing_scheme"),),
    ),
    Mutant(
        name="publish the outputs of a checkpoint under a new name",
        promise="The broker recognises outputs that an earlier process stored.",
        edits=(
            Edit(
                LOG,
                "        self._outputs = outputs or self._outputs\n",
                "        self._outputs = replace(outputs or self._outputs, "
                "run_id=self._outputs.run_id)\n",
            ),
        ),
        killers=(
            killer(
                TESTS,
                "test_a_run_that_ends_at_any_step_is_continued_without_loss_or_duplicate",
            ),
        ),
    ),
    Mutant(
        name="keep the name for a new checkpoint",
        promise="A run with a new checkpoint publishes its own outputs.",
        edits=(
            Edit(
                LOG,
                '        name = f"{self._outputs.sink_id}-{self._outputs.run_id}"\n',
                "        name = self._outputs.sink_id\n",
            ),
        ),
        killers=(killer(TESTS, "test_a_new_checkpoint_is_another_run"),),
    ),
    Mutant(
        name="receive without a limit while outputs wait",
        promise="A topic that does not confirm holds back the input.",
        edits=(
            Edit(
                LOGGED,
                "        return self._collected.bytes >= self._bytes_max\n",
                "        return False\n",
            ),
        ),
        killers=(killer(TESTS, "test_a_stalled_topic_holds_back_input_and_is_named"),),
    ),
    Mutant(
        name="complete a message before its outputs are confirmed",
        promise="Without a checkpoint, too, a message is acknowledged after its outputs.",
        edits=(
            Edit(
                "keyshard/handlers/outputs.py",
                "        self._add(_Sent(work, produced, len(produced)))\n        return True\n",
                "        self._add(_Sent(work, produced, len(produced)))\n        return False\n",
            ),
        ),
        killers=(
            killer(
                "runtime/test_outputs",
                "test_nothing_is_acknowledged_before_its_outputs_are_confirmed",
            ),
        ),
    ),
    Mutant(
        name="end a stop at a checkpoint that fails, while handlers run",
        promise="A stop waits for running handlers, also if a checkpoint cannot be stored.",
        edits=(
            Edit(
                RUN,
                '                self._dispatcher.fail(unexpected("Handling", exc))\n'
                "            time.sleep(DRAIN_LOOK_S)\n",
                '                raise unexpected("Handling", exc) from exc\n'
                "            time.sleep(DRAIN_LOOK_S)\n",
            ),
        ),
        killers=(
            killer(TESTS, "test_a_checkpoint_that_fails_during_a_stop_leaves_no_handler_behind"),
        ),
    ),
    Mutant(
        name="wait in a stop for outputs that nothing publishes any more",
        promise="A stop does not wait for what cannot come.",
        edits=(
            Edit(RUN, "stuck = self._logged is not None and self._logged.stuck", "stuck = False"),
        ),
        killers=(
            killer(
                TESTS,
                "test_a_stop_after_a_failed_commit_does_not_wait_for_replayed_dead_letters",
            ),
        ),
    ),
)
