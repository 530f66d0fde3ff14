"""Mutants of scalable topics."""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant, killer

_TESTS = "runtime/test_scalable_topics"
_ORDER = killer("simulation/test_segments", "test_keys_keep_their_order_from_parents_to_children")
_BOUNDED = "runtime/test_bounded_segments"
_AGAIN = killer(
    "simulation/test_segments", "test_a_topic_that_is_created_again_is_consumed_from_its_beginning"
)
_UNREADABLE = killer(
    "runtime/test_corrupt", "test_unreadable_entries_alone_are_acknowledged_after_a_restart"
)
_WINDOW = "unit/test_segment_order"
_STARTS = "runtime/test_segment_starts"

OF_SCALABLE_TOPICS = (
    Mutant(
        name="receive from a segment before its parents have ended",
        promise="Order: the messages of a key in a parent come before those in its children.",
        edits=(
            Edit(
                "keyshard/core/topic_segments.py",
                "        return parents is not None and not parents <= self._ended\n",
                "        return False\n",
            ),
        ),
        killers=(killer(_TESTS, "test_children_wait_until_the_parent_is_received"),),
    ),
    Mutant(
        name="take a parent for received while entries of it are to come",
        promise="Order: the messages of a key in a parent come before those in its children.",
        edits=(
            Edit(
                "keyshard/core/window/partition_window.py",
                "        return len(self.held) == backlog and not self.expected\n",
                "        return True\n",
            ),
            Edit(
                "keyshard/coordinator/partition_lifecycle.py",
                "            return last is not None and (window.holds(last) or",
                "            return True or (window.holds(last) or",
            ),
        ),
        killers=(
            killer(_TESTS, "test_children_wait_until_the_parent_is_received"),
            killer(_TESTS, "test_a_delayed_message_of_the_parent_holds_its_children_up"),
            _ORDER,
        ),
    ),
    Mutant(
        name="take as many held entries as the backlog has for the backlog",
        promise="Order: also if entries that a source holds are acknowledged by others.",
        edits=(
            Edit(
                "keyshard/coordinator/partition_lifecycle.py",
                "            return last is not None and (window.holds(last) or",
                "            return True or (window.holds(last) or",
            ),
        ),
        killers=(
            killer(_TESTS, "test_a_parent_whose_held_entries_expire_is_not_taken_for_received"),
        ),
    ),
    Mutant(
        name="wait for the commit of the parents",
        promise="A slow key of a parent holds up no other key.",
        edits=(
            Edit(
                "keyshard/coordinator/partition_lifecycle.py",
                "            if left == 0 or (left and self._has_rest(parent, left)):\n",
                "            if left == 0:\n",
            ),
        ),
        killers=(killer(_TESTS, "test_a_slow_key_of_the_parent_holds_only_itself_up"),),
    ),
    Mutant(
        name="hand out entries of a segment beside those that the window has of its parents",
        promise="Order: a batch has rows of a segment only with all rows of its parents.",
        edits=(
            Edit(
                "keyshard/core/window/window.py",
                "        return not self._filled.keys().isdisjoint(",
                "        return False and not self._filled.keys().isdisjoint(",
            ),
        ),
        killers=(
            _ORDER,
            killer(_TESTS, "test_a_batch_has_no_rows_of_children_while_the_parent_has_more"),
            killer(_WINDOW, "test_handlers_get_entries_of_a_segment_after_those_of_its_ancestors"),
        ),
    ),
    Mutant(
        name="lay segments out by their names",
        promise="Order: in a batch, rows of a segment come after those of its parents.",
        edits=(
            Edit(
                "keyshard/core/window/layout.py",
                "sorted(entries, key=reading_order)",
                "sorted(entries)",
            ),
        ),
        killers=(
            _ORDER,
            killer(_TESTS, "test_rows_of_children_come_after_those_of_the_parent_in_one_batch"),
        ),
    ),
    Mutant(
        name="store completed entries of a segment without those of its parents",
        promise="Order: a restart repeats no message after newer ones of its key.",
        edits=(
            Edit(
                "keyshard/core/window/window.py",
                "            if left and not left.keys().isdisjoint(",
                "            if False and not left.keys().isdisjoint(",
            ),
        ),
        killers=(
            killer(
                _WINDOW,
                "test_completed_entries_stay_out_of_a_checkpoint_that_lacks_some_of_an_ancestor",
            ),
        ),
    ),
    Mutant(
        name="forget handled messages of a parent of which no entry is completed",
        promise="Order: a restart repeats no message after newer ones of its key.",
        edits=(
            Edit(
                "keyshard/coordinator/in_flight.py",
                "                    found |= left & order.ancestors(where)\n",
                "                    pass\n",
            ),
        ),
        killers=(
            killer(
                _TESTS, "test_a_restart_repeats_no_message_of_a_parent_after_those_of_its_children"
            ),
        ),
    ),
    Mutant(
        name="store handled messages of a segment although entries of its parent have no room",
        promise="Order: a restart repeats no message after newer ones of its key.",
        edits=(
            Edit(
                "keyshard/coordinator/in_flight.py",
                "{where for where in found if order.ancestors(where).isdisjoint(unfit)}",
                "found",
            ),
        ),
        killers=(
            killer(
                "runtime/test_entry_run",
                "test_handled_messages_of_a_segment_stay_out_of_a_checkpoint_without_room_for_"
                "its_parent",
            ),
        ),
    ),
    Mutant(
        name="count a dead letter as done although an older message of a parent runs again",
        promise="Order: what was replayed runs again behind an older message of its key.",
        edits=(
            Edit(
                "keyshard/dead_letters/topic_state.py",
                "        return [one for one in done.places if one > place]\n",
                "        return [one for one in done.places if one > place and one[0] == number]\n",
            ),
        ),
        killers=(
            killer("unit/test_parking"),
            killer(
                "runtime/test_parked_redelivery",
                "test_a_dead_letter_of_a_segment_runs_behind_a_redelivery_of_its_parent",
            ),
        ),
    ),
    Mutant(
        name="register no subscription",
        promise="No loss: the broker keeps a sealed segment until it is acknowledged.",
        edits=(
            Edit(
                "keyshard/broker/scalable_topics.py",
                "                self._admin.register(topic, self._subscription)\n",
                "                pass\n",
            ),
        ),
        killers=(
            killer(_TESTS, "test_a_sealed_segment_stays_at_the_broker_until_it_is_acknowledged"),
        ),
    ),
    Mutant(
        name="register only new segments",
        promise="No loss: a registration that another client deleted is made again.",
        edits=(
            Edit(
                "keyshard/coordinator/discovery.py",
                "register(self._unregistered if early else self._known)",
                "register(self._unregistered)",
            ),
        ),
        killers=(killer(_TESTS, "test_a_registration_that_another_client_deleted_is_made_again"),),
    ),
    Mutant(
        name="miss no consumer of a segment",
        promise="A consumer that the broker forgot is subscribed again.",
        edits=(
            Edit(
                "keyshard/core/subscription_state.py",
                "return all(consumer.name != name for consumer in self.consumers)",
                "return False",
            ),
            Edit(
                "keyshard/core/subscription_state.py",
                "return overlap((hash_range,), self.gaps)",
                "return bool(self.consumers) and overlap((hash_range,), self.gaps)",
            ),
        ),
        killers=(killer(_TESTS, "test_consumers_that_the_broker_forgot_are_subscribed_again"),),
    ),
    Mutant(
        name="take the graph of a broker that has not heard of the newest change",
        promise="No loss: a segment that exists is consumed.",
        edits=(
            Edit(
                "keyshard/broker/scalable_topics.py",
                "        if known is not None and found.precedes(known):\n",
                "        if known is found:\n",
            ),
        ),
        killers=(killer(_TESTS, "test_an_older_graph_of_another_broker_deletes_nothing"),),
    ),
    Mutant(
        name="let the broker create a topic that is only looked up",
        promise="A first start creates nothing.",
        edits=(
            Edit(
                "keyshard/broker/wire/scalable_watches.py",
                "create_if_missing=False",
                "create_if_missing=True",
            ),
        ),
        killers=(
            killer(
                "unit/test_segment_watch",
                "test_the_first_report_is_the_graph_and_later_ones_replace_it",
            ),
        ),
    ),
    Mutant(
        name="let a pattern of persistent topics match scalable ones",
        promise="A pattern matches one kind of topics.",
        edits=(
            Edit(
                "keyshard/core/topic_pattern.py",
                "        name = topic.removeprefix(self._base)\n",
                "        name = topic.partition(self._base.partition('://')[2])[2] or topic\n",
            ),
        ),
        killers=(
            killer(
                "unit/test_topic_pattern",
                "test_a_pattern_matches_whole_names_of_one_namespace",
            ),
        ),
    ),
    Mutant(
        name="trust the watch of a topic that was reported",
        promise="A topic that is deleted, or created again, is noticed at once.",
        edits=(
            Edit(
                "keyshard/broker/topics.py",
                "                self.scalable.look_again(filter(is_scalable, selected))\n",
                "",
            ),
        ),
        killers=(
            killer(
                "runtime/test_scalable_patterns",
                "test_a_named_topic_that_is_created_again_is_reported_too",
            ),
        ),
    ),
    Mutant(
        name="trust the watch of a topic that is not listed any more",
        promise="A deleted topic is dropped in the next round.",
        edits=(
            Edit(
                "keyshard/broker/topics.py",
                "            self.scalable.exist_only(found)\n",
                "",
            ),
        ),
        killers=(
            killer(
                "runtime/test_scalable_patterns",
                "test_a_deleted_topic_is_dropped_in_the_next_round_without_a_report",
            ),
        ),
    ),
    Mutant(
        name="subscribe each range of a segment",
        promise="Order: entries of mixed keys come to one consumer, in their order.",
        edits=(
            Edit(
                "keyshard/core/topic_segments.py",
                "    return _ONE_CONSUMER if is_segment(where) else assignment\n",
                "    return assignment\n",
            ),
        ),
        killers=(
            killer(_TESTS, "test_batches_of_mixed_keys_keep_their_order_in_a_stream"),
            killer(_TESTS, "test_batches_of_mixed_keys_keep_their_order_in_handlers"),
        ),
    ),
    Mutant(
        name="leave an entry of mixed keys in the partition of its first key",
        promise="All messages of a key in a batch are in one partition.",
        edits=(
            Edit(
                "keyshard/core/window/layout.py",
                "            if segment and block.mixed_slots:\n",
                "            if False:\n",
            ),
        ),
        killers=(
            killer(_TESTS, "test_a_key_of_a_mixed_batch_is_in_the_layout_partition_of_its_slot"),
            killer("unit/test_layout", "test_entries_of_segments_are_divided_by_slot"),
        ),
    ),
    Mutant(
        name="give a partition all messages of an entry that it shares",
        promise="Each message is in a batch once.",
        edits=(
            Edit(
                "keyshard/coordinator/batches.py",
                "            found.append(one if rows is None",
                "            found.append(one if True",
            ),
        ),
        killers=(
            killer(_TESTS, "test_a_key_of_a_mixed_batch_is_in_the_layout_partition_of_its_slot"),
        ),
    ),
    Mutant(
        name="end the start because a segment was deleted after it was subscribed",
        promise="A segment that the broker deletes stops nothing.",
        edits=(
            Edit(
                "keyshard/consumers/subscribe.py",
                "        if leaves_out:\n            return False\n",
                "        if False:\n            return False\n",
            ),
        ),
        killers=(
            killer(_TESTS, "test_a_segment_that_is_deleted_once_it_is_subscribed_stops_nothing"),
        ),
    ),
    Mutant(
        name="let the consumer of a segment pause though it owes an entry",
        promise="Progress: an owner of a missing entry receives while the checkpoint has no room.",
        edits=(
            Edit(
                "keyshard/core/window/partition_window.py",
                "        self.owners = frozenset([0]) if self.whole and owners else owners\n",
                "        self.owners = owners\n",
            ),
        ),
        killers=(
            killer(
                "unit/test_backpressure",
                "test_the_consumer_of_a_segment_that_owes_an_entry_goes_on_without_room",
            ),
        ),
    ),
    Mutant(
        name="forget messages that are done before another key of their entry",
        promise="Order: a restart repeats no message after newer ones of its key.",
        edits=(
            Edit(
                "keyshard/core/lanes/lanes.py",
                "        elif entry.has_keys:\n",
                "        elif False:\n",
            ),
        ),
        killers=(
            killer(
                _TESTS,
                "test_a_restart_repeats_no_message_that_was_handled_before_another_key_of_its_entry",
            ),
        ),
    ),
    Mutant(
        name="store handled messages only until the next restart",
        promise="Order: a restart repeats no message after newer ones of its key.",
        edits=(
            Edit(
                "keyshard/handlers/entry_run.py",
                "copied({} if stored is None else stored.handled)",
                "copied({})",
            ),
        ),
        killers=(
            killer(
                "runtime/test_entry_run",
                "test_handled_messages_of_an_unfinished_entry_do_not_come_again",
            ),
        ),
    ),
    Mutant(
        name="wait in a bounded run for a segment that the broker has deleted",
        promise="A bounded run ends, also if segments are deleted after they were drained.",
        edits=(
            Edit(
                "keyshard/coordinator/partition_lifecycle.py",
                "        gone = self._of_run - (existing - self._scalable.created_again)\n",
                "        gone = set[TopicPartition]()\n",
            ),
        ),
        killers=(
            killer(
                _BOUNDED,
                "test_a_segment_that_is_deleted_after_it_was_drained_is_not_waited_for",
            ),
        ),
    ),
    Mutant(
        name="leave segments for a later run while it is unknown whether they wait",
        promise="A bounded run has every message that was published before its start.",
        edits=(
            Edit(
                "keyshard/coordinator/available_now.py",
                "        if self._unseen:\n            return self._unseen\n",
                "",
            ),
            Edit(
                "keyshard/coordinator/available_now.py",
                "        seen_s = min(quiet_s, time.monotonic() - self._unseen_s)\n",
                "        seen_s = quiet_s\n",
            ),
        ),
        killers=(killer(_BOUNDED, "test_a_run_whose_segments_stay_unknown_fails_with_the_reason"),),
    ),
    Mutant(
        name="take the oldest entries of a segment as stored, whatever retention removed",
        promise="A bounded read names entries that are gone.",
        edits=(
            Edit(
                "keyshard/reading/split_reader.py",
                " for span in split.spans if span.ledger >= first.ledger}\n",
                " for span in split.spans}\n",
            ),
        ),
        killers=(
            killer(
                "runtime/test_scalable_reads",
                "test_entries_that_retention_removes_after_the_plan_are_named",
            ),
        ),
    ),
    Mutant(
        name="receive from a merged segment after one of its parents",
        promise="Order: the messages of a key come after those in the segment that had it before.",
        edits=(
            Edit("keyshard/core/topic_segments.py", "not parents <= self", "not parents & self"),
        ),
        killers=(_ORDER,),
    ),
    Mutant(
        name="take an empty segment that waits for its parents for one that has ended",
        promise="Order: messages of a key come before those in grandchildren.",
        edits=(
            Edit(
                "keyshard/core/topic_segments.py",
                "        return {parent for parent in found if not self.waits(parent)}\n",
                "        return found\n",
            ),
        ),
        killers=(_ORDER,),
    ),
    Mutant(
        name="begin with children and parents at once",
        promise="Order: it is kept across a restart.",
        edits=(
            Edit(
                "keyshard/coordinator/coordinator.py",
                "order.parents = catalog.scalable.parents()",
                "order.parents = {}",
            ),
        ),
        killers=(_ORDER,),
    ),
    Mutant(
        name="end a bounded run in silence though a segment has a backlog",
        promise="A bounded run has every message that was published before its start.",
        edits=(
            Edit(
                "keyshard/coordinator/available_now.py",
                "            sure = sure or (backlog or 0) > len(self._window.known[where].held)\n",
                "            sure = sure\n",
            ),
        ),
        killers=(
            killer(_BOUNDED, "test_a_silent_broker_ends_no_run_while_a_segment_has_a_backlog"),
        ),
    ),
    Mutant(
        name="take a topic for the deleted one of its name, because the broker reports no deletion",
        promise="No loss: a topic that is created again is consumed from its beginning.",
        edits=(
            Edit(
                "keyshard/broker/scalable_topics.py",
                "time.monotonic() - opened_s < LOOK_AGAIN_S and topic not in self._doubtful",
                "True",
            ),
        ),
        killers=(_AGAIN,),
    ),
    Mutant(
        name="acknowledge no unreadable entry before a readable one",
        promise="Liveness: segments wait only until everything in their parents is acknowledged.",
        edits=(
            Edit(
                "keyshard/consumers/identity_check.py",
                "if one not in known or one in unreadable]",
                "if one not in known]",
            ),
        ),
        killers=(_UNREADABLE,),
    ),
    Mutant(
        name="take no unreadable entry before a readable one",
        promise="Liveness: segments wait only until everything in their parents is acknowledged.",
        edits=(
            Edit(
                "keyshard/consumers/identity_check.py",
                "        if any(entry_id in known for entry_id in unreadable):\n",
                "        if newest and any(entry_id in known for entry_id in unreadable):\n",
            ),
        ),
        killers=(_UNREADABLE,),
    ),
    Mutant(
        name="spread an expected load equally over segments of different widths",
        promise="keyshard doctor --rate compares the load of the segment with most keys.",
        edits=(
            Edit(
                "keyshard/core/segment_diagnosis.py",
                "return HASHES // max(widths)",
                "return len([*widths])",
            ),
        ),
        killers=(
            killer(
                _TESTS,
                "test_the_doctor_compares_an_expected_load_with_the_widest_open_segment",
            ),
        ),
    ),
    Mutant(
        name="mark no start at positions as unfinished",
        promise="A start that died is made again: no earlier message comes, and none is lost.",
        edits=(
            Edit(
                "keyshard/coordinator/segment_starts.py",
                "            self._register(self._mark)\n",
                "",
            ),
        ),
        killers=(
            killer(_STARTS, "test_a_start_that_died_is_made_again_and_nothing_is_lost_or_repeated"),
        ),
    ),
    Mutant(
        name="trust the broker about where a subscription begins",
        promise="A source starts at its position, or not at all.",
        edits=(Edit("keyshard/coordinator/segment_starts.py", "if first != second:", "if False:"),),
        killers=(killer(_STARTS, "test_a_subscription_that_begins_elsewhere_is_named"),),
    ),
    Mutant(
        name="trust the broker to keep acknowledgements of parts of entries",
        promise="A source that starts inside an entry gets no earlier message of it.",
        edits=(
            Edit(
                "keyshard/coordinator/segment_starts.py",
                "if one.start.batch_index and",
                "if not one.start and",
            ),
        ),
        killers=(killer(_STARTS, "test_a_broker_that_keeps_no_parts_of_entries_is_named"),),
    ),
    Mutant(
        name="move a subscription that exists",
        promise="An existing subscription stays where it is.",
        edits=(
            Edit(
                "keyshard/coordinator/segment_starts.py",
                "if self._has_mark() or not self._exists_in_some():",
                "if True:",
            ),
        ),
        killers=(killer(_STARTS, "test_an_existing_subscription_stays_where_it_is"),),
    ),
    Mutant(
        name="wait for a reader that lost its connection at the end of a segment",
        promise="A start outlives a lost connection.",
        edits=(
            Edit(
                "keyshard/reading/segment_ledgers.py",
                "                if not reader.stayed_connected():\n",
                "                if False:\n",
            ),
        ),
        killers=(
            killer(
                _STARTS,
                "test_a_reader_that_loses_its_connection_at_the_end_of_a_segment_is_replaced",
            ),
        ),
    ),
    Mutant(
        name="check positions that are ignored",
        promise="An existing subscription goes on, also if segments of the positions are deleted.",
        edits=(
            Edit("keyshard/coordinator/start_positions.py", "    if not due:\n", "    if False:\n"),
        ),
        killers=(
            killer(
                _STARTS, "test_the_positions_of_an_existing_subscription_may_be_in_deleted_segments"
            ),
        ),
    ),
    Mutant(
        name="leave the mark of a start that another one at an edge replaces",
        promise="A subscription that was consumed is not moved.",
        edits=(
            Edit(
                "keyshard/coordinator/start_positions.py",
                "            list(pool.map(SegmentStarts.abandon, starts))\n",
                "",
            ),
        ),
        killers=(killer(_STARTS, "test_a_start_at_an_edge_ends_an_earlier_start_at_positions"),),
    ),
    Mutant(
        name="do not look again after the starts are found",
        promise="A subscription that another source began to consume meanwhile is not moved.",
        edits=(
            Edit(
                "keyshard/coordinator/segment_starts.py",
                "            if not self.are_due():\n                return\n",
                "",
            ),
        ),
        killers=(
            killer(_STARTS, "test_a_start_moves_nothing_that_another_start_has_consumed_meanwhile"),
        ),
    ),
    Mutant(
        name="read segments without a position from their beginning",
        promise="Positions name every segment that existed when they were noted.",
        edits=(
            Edit(
                "keyshard/core/segment_bounds.py",
                "    return reached > one.last_hash\n",
                "    return True\n",
            ),
        ),
        killers=(
            killer("unit/test_segment_bounds", "test_a_segment_that_existed_needs_a_position"),
        ),
    ),
    Mutant(
        name="ignore positions in deleted segments",
        promise="No loss: messages after a position in a deleted segment are a named loss.",
        edits=(
            Edit(
                "keyshard/core/segment_bounds.py",
                "    if not lost:\n",
                "    if True:\n",
            ),
        ),
        killers=(killer(_STARTS, "test_positions_in_a_segment_that_was_deleted_are_data_loss"),),
    ),
    Mutant(
        name="name the table of a scalable topic as that of a persistent topic",
        promise="A table never stands for another topic of the same name.",
        edits=(
            Edit(
                "spark_adapter/session_catalog.py",
                "    return SCALABLE + name if is_scalable(topic) else name\n",
                "    return name\n",
            ),
        ),
        killers=(
            killer(
                "unit/test_catalog_plan",
                "test_scalable_and_persistent_topics_of_one_name_have_tables_of_their_own",
            ),
        ),
    ),
    Mutant(
        name="host all segments in one worker",
        promise="Workers share the segments of a scalable topic.",
        edits=(
            Edit(
                "keyshard/workers/broker.py",
                "    return (key_slot(topic) + number) % workers\n",
                "    return key_slot(topic) % workers\n",
            ),
        ),
        killers=(
            killer("runtime/test_scalable_workers", "test_workers_share_the_segments_of_a_topic"),
        ),
    ),
)
