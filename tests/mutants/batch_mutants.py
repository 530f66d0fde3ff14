"""Mutants of ranges, the window, batches and their checkpoints."""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant, killer

PARTITION_WINDOW = "keyshard/core/window/partition_window.py"
RESCALE = "keyshard/coordinator/rescale.py"
STREAM_RUNTIME = "spark_adapter/stream_runtime.py"
ANY_ORDER = killer("property/test_window")
ASYNC_PROGRESS = killer(
    "unit/test_stream_reader", "test_async_progress_is_refused_with_nothing_acknowledged"
)

OF_BATCHES = (
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
                "                    ids = [block.id for block in blocks]\n"
                "                    self._consumers.acknowledge({where: ids})\n",
            ),
        ),
        killers=(ASYNC_PROGRESS,),
    ),
    Mutant(
        name="acknowledge a planned batch before the host showed that it commits in time",
        promise="No loss: under async progress tracking nothing says what is durable.",
        edits=(
            Edit(
                STREAM_RUNTIME,
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
                "keyshard/coordinator/startup.py",
                "checkpoint.partitions if checkpoint else {},",
                "{},",
            ),
        ),
        killers=(
            killer(
                "runtime/test_coordinator_redelivery",
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
                "test_entries_at_or_below_the_floor_or_delivered_are_resolved",
            ),
            killer(
                "property/test_entry_set",
                "test_pruning_below_a_floor_resolves_the_same_entries_and_those_below_it",
            ),
            ANY_ORDER,
        ),
    ),
    Mutant(
        name="nack in ordered mode",
        promise="Order: a message that is queued anew is overtaken by later ones of its key.",
        edits=(
            Edit(
                "keyshard/broker/client/consumer.py",
                "        return to_blocks(messages, self._topic_partition, self._spec.hash_range, ",
                "        for message in messages:\n"
                "            if message.redelivery_count() > 0:\n"
                "                self._raw.negative_acknowledge(message)\n"
                "        return to_blocks(messages, self._topic_partition, self._spec.hash_range, ",
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
                "keyshard/coordinator/start_positions.py",
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
                "keyshard/consumers/intake.py",
                "        if misrouted:\n"
                "            self._anomalies.misrouted(owned_range, misrouted)\n",
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
                "keyshard/consumers/receiver.py",
                "                entries.extend(assembly.add(block, after_gap=polled or i == 0))\n",
                "                entries.extend("
                "assembly.add(block, after_gap=polled or i == 0))\n"
                "            assembly.open = None\n",
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
                "keyshard/consumers/subscribe.py",
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
                "        taken, rest = take_aligned(received[:count], limits, _sizes, "
                "self.left_out)\n",
                "        fitting = received[:count]\n"
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
                "            batch=(delivered | batch) - before.delivered,\n",
            ),
        ),
        killers=(killer("unit/test_window_ack_gaps"), ANY_ORDER),
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
                "keyshard/core/window/planned_batches.py",
                "        self._planned: dict[str, PlannedBatch] = {}\n",
                "        self._planned: dict[str, PlannedBatch] = {}\n        self.ranges = 0\n",
            ),
            Edit(
                "keyshard/core/window/planned_batches.py",
                "lay_out(entries, checkpoint.ranges, checkpoint.merged)",
                "lay_out(entries, self.ranges or checkpoint.ranges, checkpoint.merged)",
            ),
        ),
        killers=(killer("runtime/test_batch_replay"),),
    ),
    Mutant(
        name="keep the old text of a topic partition in a checkpoint",
        promise="Exactly once: the text of a checkpoint has the entries of every batch before it.",
        edits=(
            Edit(
                "keyshard/core/window/planned_batches.py",
                "            self._unwritten[topic_partition] = None\n",
                "            if topic_partition not in self._texts:\n"
                "                self._unwritten[topic_partition] = None\n",
            ),
        ),
        killers=(killer("unit/test_window"), killer("unit/test_window_ack_gaps")),
    ),
    Mutant(
        name="raise a floor over an entry that is not delivered",
        promise="No loss: an ack gap without evidence stays below no floor.",
        edits=(
            Edit(
                "keyshard/core/position/entry_set.py",
                "end_of_run(self._ledgers.get(ledger, ()), entry + 1)",
                "end_of_run(self._ledgers.get(ledger, ()), entry + 2)",
            ),
        ),
        killers=(
            killer("property/test_entry_set", "test_a_floor_rises_over_the_run_after_it"),
            killer("unit/test_window"),
        ),
    ),
    Mutant(
        name="serialize a bitmap as it was built",
        promise="Equal sets have equal texts, and a checkpoint can be read.",
        edits=(
            Edit(
                "keyshard/core/position/ledger_entries.py",
                "serialized, first = _serialized(entries), entries.min()",
                "serialized, first = entries.serialize(), entries.min()",
            ),
        ),
        killers=(
            killer("unit/test_entry_set", "test_the_text_does_not_depend_on_the_way_to_the_set"),
        ),
    ),
    Mutant(
        name="take any entry without room in the checkpoint",
        promise="A source whose checkpoint has no room holds no more than its window may.",
        edits=(
            Edit(
                "keyshard/consumers/intake.py",
                "        if not window.pauses.late_only(where, owned_range.range_index):\n",
                "        if where in window.known:\n",
            ),
        ),
        killers=(
            killer(
                "runtime/test_delayed_messages",
                "test_a_source_without_room_fills_its_window_and_reports_it[1-True-False]",
            ),
        ),
    ),
    Mutant(
        name="limit the last checkpoint of a run",
        promise="An ordered stop repeats nothing.",
        edits=(Edit("keyshard/handlers/entry_run.py", "limited=not last", "limited=True"),),
        killers=(
            killer(
                "runtime/test_delayed_messages",
                "test_a_stop_repeats_nothing_for_which_the_checkpoint_had_no_room",
            ),
            killer(
                "runtime/test_delayed_messages",
                "test_a_stop_of_batches_repeats_nothing_either",
            ),
        ),
    ),
    Mutant(
        name="look for no gap that lies alone behind the floor",
        promise="Each gap is resolved, also the only one of a topic partition.",
        edits=(
            Edit(
                "keyshard/coordinator/gap_resolver.py",
                "                if part.has_ack_gaps\n",
                "                if part.ack_gaps\n",
            ),
        ),
        killers=(
            killer(
                "runtime/test_gap_evidence",
                "test_the_only_gap_is_resolved_although_one_run_follows_the_floor",
            ),
        ),
    ),
    Mutant(
        name="end a bounded run at an unreadable entry between the gaps that it reads",
        promise="An entry that was skipped is resolved, whatever on_corrupt says later.",
        edits=(
            Edit(
                "keyshard/reading/gap_reader.py",
                "                if _is_in(gaps, entry_id) and not",
                "                if not",
            ),
        ),
        killers=(
            killer(
                "runtime/test_available_now",
                "test_a_skipped_entry_between_gaps_does_not_end_a_later_run",
            ),
        ),
    ),
    Mutant(
        name="take a topic that is deleted during a bounded read for a wrong name",
        promise="Entries that were removed after the plan are a named loss, or left out.",
        edits=(
            Edit(
                "keyshard/reading/split_reader.py",
                "        except (BookieReadError, TopicNotFoundError):\n",
                "        except BookieReadError:\n",
            ),
        ),
        killers=(
            killer(
                "runtime/test_source_read",
                "test_a_topic_that_is_deleted_before_a_reader_opens_is_named_or_left_out",
            ),
        ),
    ),
    Mutant(
        name="take an unreadable entry of a gap for one that is not stored",
        promise="No loss without a word: what others acknowledged is named, readable or not.",
        edits=(
            Edit(
                "keyshard/reading/gap_reader.py",
                "                    elif entry_id in stretch:\n",
                "                    elif False:\n",
            ),
        ),
        killers=(
            killer(
                "runtime/test_corrupt",
                "test_a_corrupt_entry_that_another_client_acknowledged_is_a_counted_loss",
            ),
        ),
    ),
    Mutant(
        name="name an old cause where a bounded run ends because its consumers are away",
        promise="The error of a bounded run says what it waits for.",
        edits=(
            Edit(
                "keyshard/coordinator/available_now.py",
                "                    arrived_s, missing = now, away\n",
                "                    arrived_s = now\n",
            ),
        ),
        killers=(
            killer("runtime/test_available_now", "test_a_run_whose_consumers_are_away_names_them"),
        ),
    ),
    Mutant(
        name="gather evidence once",
        promise="The floor rises, although a lost connection dropped evidence.",
        edits=(
            Edit(
                "keyshard/coordinator/gap_resolver.py",
                "        if view.doubts != evidence.doubts:\n",
                "        if view.doubts < 0:\n",
            ),
        ),
        killers=(
            killer(
                "runtime/test_ack_gaps",
                "test_evidence_dropped_by_an_uncertain_topic_identity_is_gathered_again",
            ),
        ),
    ),
    Mutant(
        name="deduplicate a half-received entry by its id",
        promise="No loss: an entry that a reconnect starts again replaces what was held of it.",
        edits=(
            Edit(
                "keyshard/core/position/entry_assembly.py",
                "        if held is None or block.indices[0] <= held.indices[-1]:\n"
                "            self.open = held = block\n",
                "        if held is not None and block.indices[0] <= held.indices[-1]:\n"
                "            return done\n"
                "        if held is None:\n"
                "            self.open = held = block\n",
            ),
        ),
        killers=(
            killer(
                "unit/test_entry_assembly", "test_an_entry_that_starts_again_replaces_its_held_part"
            ),
        ),
    ),
    Mutant(
        name="move a range while a handler works on it",
        promise="Order: the old owner's handlers end before the new owner's begin.",
        edits=(Edit(RESCALE, "                self._drain(began_s)\n", ""),),
        killers=(
            killer(
                "runtime/test_rescale_handlers",
                "test_a_handler_that_hangs_is_named_and_everything_continues",
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
                "runtime/test_rescale",
                "test_ranges_that_another_client_holds_go_back_to_their_owners",
            ),
            killer(
                "runtime/test_rescale",
                "test_ranges_that_get_no_consumer_in_a_rescale_end_the_source",
            ),
        ),
    ),
    Mutant(
        name="give new topic partitions the ranges of the start",
        promise="No loss: every slot of every topic partition has one owner.",
        edits=(
            Edit(
                "keyshard/consumers/range_consumers.py",
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
        name="resolve in silence what somebody else acknowledged",
        promise="No loss without a word: failOnDataLoss ends a source that runs, too.",
        edits=(
            Edit(
                "keyshard/coordinator/gap_resolver.py",
                "            self._report_lost("
                "topic_partition, view, evidence, lasting.resolved & doubted)\n"
                "            _leave_out(lasting, doubted - evidence.absent - evidence.lost)\n",
                "",
            ),
        ),
        killers=(
            killer(
                "runtime/test_lost_entries",
                "test_an_acknowledgement_by_another_client_ends_the_running_source",
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
        killers=(killer("unit/test_topic_identity"),),
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
        name="name a planned batch of a deleted topic a wrong name",
        promise="No loss without a word: rows of a deleted topic are lost, and may be accepted.",
        edits=(
            Edit(
                "keyshard/reading/replay.py",
                '                _log.info("a planned batch has entries of a deleted topic: %s", '
                "exc.summary)\n"
                "                break\n",
                "                raise\n",
            ),
        ),
        killers=(
            killer(
                "unit/test_replay",
                "test_entries_of_a_topic_that_is_deleted_are_data_loss_and_named",
            ),
        ),
    ),
    Mutant(
        name="do not count entries that are lost with a worker",
        promise="No loss without a count.",
        edits=(
            Edit(
                "keyshard/coordinator/batches.py",
                "            self._window.counters.entries_lost += lost\n",
                "",
            ),
        ),
        killers=(
            killer(
                "runtime/test_remote_content",
                "test_a_partition_that_is_lost_with_its_worker_is_empty_where_loss_is_accepted",
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
    Mutant(
        name="start as if a missing subscription had retained everything",
        promise="No silent loss: without a subscription, the broker deletes what no batch has.",
        edits=(
            Edit(
                "keyshard/coordinator/startup.py",
                "if broker_state.mark_delete is None or not same(topic_partition):",
                "if not same(topic_partition):",
            ),
        ),
        killers=(
            killer(
                "runtime/test_deleted_subscriptions",
                "test_an_older_checkpoint_still_names_a_subscription_that_is_missing",
            ),
        ),
    ),
    Mutant(
        name="take any subscription of the name for that of the checkpoint",
        promise="No silent loss: a subscription that was created again has retained nothing.",
        edits=(
            Edit(
                "keyshard/coordinator/subscription_ids.py",
                "        return where in self._with_id or where not in self._named\n",
                "        return True\n",
            ),
        ),
        killers=(
            killer(
                "runtime/test_deleted_subscriptions",
                "test_messages_trimmed_without_a_subscription_are_a_named_loss",
            ),
        ),
    ),
    Mutant(
        name="name an id that some subscriptions lack",
        promise="No false loss: only subscriptions that had the id are compared.",
        edits=(
            Edit(
                "keyshard/coordinator/subscription_ids.py",
                "        return SubscriptionId(self._id, without)\n",
                "        return SubscriptionId(self._id)\n",
            ),
        ),
        killers=(
            killer(
                "runtime/test_deleted_subscriptions",
                "test_a_topic_that_was_set_aside_before_it_had_an_id_is_no_loss",
            ),
        ),
    ),
    Mutant(
        name="replace the ids of other sources",
        promise="No false loss: a source leaves alone what another one recognizes.",
        edits=(
            Edit(
                "keyshard/coordinator/subscription_ids.py",
                "            self._other.add(where)\n",
                "            pass\n",
            ),
        ),
        killers=(
            killer(
                "runtime/test_deleted_subscriptions",
                "test_a_source_leaves_the_ids_of_other_sources",
            ),
        ),
    ),
    Mutant(
        name="forget where subscriptions began",
        promise="Messages from before the start stay away, whatever happens to a subscription.",
        edits=(
            Edit(
                "keyshard/coordinator/coordinator.py",
                "        prove_beginnings(self._admin, config, checkpoint, window)\n",
                "",
            ),
        ),
        killers=(
            killer(
                "runtime/test_deleted_subscriptions",
                "test_messages_before_the_start_stay_away_after_a_deletion",
            ),
        ),
    ),
)
