"""Mutants of the rules by which a sink stores each row once (ADR 0034)."""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant, killer

SINK = "runtime/test_sink"
ATTEMPTS = "runtime/test_sink_attempts"
CLAIMS = "runtime/test_sink_claim"
CLAIM = "keyshard/publishing/sink_claim.py"
DECISIONS = "keyshard/core/publishing.py"
UNCONFIRMED = "keyshard/broker/unconfirmed.py"
TOPIC_WRITE = "runtime/test_topic_write"
STREAM_WRITER = "spark_adapter/stream_writer.py"
TOPIC_WRITER = "spark_adapter/topic_writer.py"
WRITE_OPTIONS = "spark_adapter/write_options.py"
LOOKED_AGAIN = "test_rows_that_another_attempt_stored_after_the_search_are_searched_again"

OF_SINK = (
    Mutant(
        name="publish again what the broker may know, without asking by one message",
        promise="An entry of old and new messages is never sent: the broker would drop it whole.",
        edits=(
            Edit(
                DECISIONS,
                "    return Resume(covered, last, split)\n",
                "    return Resume(0, None, split=False)\n",
            ),
        ),
        killers=(killer(ATTEMPTS, "test_an_attempt_that_dies_anywhere_is_completed_by_the_next"),),
    ),
    Mutant(
        name="publish an older batch under a name",
        promise="What an old attempt still writes is refused by name, and not lost in silence.",
        edits=(
            Edit(
                DECISIONS,
                "    if batch_of(last) > batch_of(first_id):\n        raise LaterBatchError\n",
                "",
            ),
        ),
        killers=(killer(SINK, "test_batches_follow_one_another_and_an_old_one_is_refused"),),
    ),
    Mutant(
        name="follow an attempt that distributed its rows otherwise",
        promise="A repeated batch whose rows belong elsewhere is refused by name.",
        edits=(Edit(DECISIONS, "layout_of(last) != layout_of(first_id) or ", ""),),
        killers=(killer(SINK, "test_a_repeated_batch_that_is_distributed_otherwise_is_refused"),),
    ),
    Mutant(
        name="publish rows before all are known to fit",
        promise="Nothing of a batch with a row that is too large is sent.",
        edits=(
            Edit(
                "keyshard/publishing/batch_writer.py",
                "            part.check_sizes()\n",
                "",
            ),
        ),
        killers=(killer(SINK, "test_a_row_that_is_too_large_is_refused_before_anything_is_sent"),),
    ),
    Mutant(
        name="check the sizes of a topic partition when its turn comes",
        promise="Nothing of a batch with a row that is too large is sent.",
        edits=(
            Edit("keyshard/publishing/batch_writer.py", "            part.check_sizes()\n", ""),
            Edit(
                "keyshard/publishing/batch_part.py",
                "    start = part.first\n",
                "    start = part.first\n    part.check_sizes()\n",
            ),
        ),
        killers=(killer(SINK, "test_a_row_that_is_too_large_is_refused_before_anything_is_sent"),),
    ),
    Mutant(
        name="ask by more than one message whether all are stored",
        promise="What is accepted only does not count as stored: it may be lost.",
        edits=(
            Edit(
                DECISIONS,
                "    return row_of(last) + stored\n",
                "    return max(0, row_of(last) + stored - 7)\n",
            ),
            Edit(
                UNCONFIRMED,
                "        rows = holder.rows[row : row + 1]\n"
                "        self._probe = Pending(rows, found.probe, self._encode(rows, "
                "found.probe))\n",
                "        rows = holder.rows[: row + 1]\n"
                "        self._probe = Pending(rows, holder.first, self._encode(rows, 0))\n",
            ),
            Edit(
                UNCONFIRMED,
                "            return self._probed(sequence_id)\n",
                "            return self._probed(self._probe.last)\n",
            ),
        ),
        killers=(killer(ATTEMPTS, "test_rows_that_are_stored_in_part_are_not_taken_for_stored"),),
    ),
    Mutant(
        name="leave out what an earlier attempt sent and the broker lost",
        promise="If the storage of the broker loses accepted rows, they are sent again.",
        edits=(
            Edit(
                UNCONFIRMED,
                "        if self._relied_on is not None and last < self._relied_on:\n"
                "            raise RolledBackError\n",
                "        del last\n",
            ),
        ),
        killers=(
            killer(
                ATTEMPTS,
                "test_rows_that_an_earlier_attempt_sent_and_a_failed_write_lost_are_sent_again",
            ),
        ),
    ),
    Mutant(
        name="count entries instead of rows",
        promise="A retry that cuts the entries in another way stores each row once.",
        edits=(
            Edit(
                UNCONFIRMED,
                "        return self.first + len(self.rows) - 1\n",
                "        return self.first\n",
            ),
            Edit(
                "keyshard/broker/memory/entry_producer.py",
                "found.append(self.publish(OutgoingSlice(columns, start, stop), "
                "sequence_id + start))\n",
                "found.append(self.publish(OutgoingSlice(columns, start, stop), "
                "sequence_id + len(found)))\n",
            ),
        ),
        killers=(killer(SINK, "test_a_batch_that_is_written_again_is_stored_once"),),
    ),
    Mutant(
        name="report a batch before its rows are confirmed",
        promise="Spark gets the commit message of a task after all its rows are stored.",
        edits=(
            Edit(
                "keyshard/publishing/batch_part.py",
                "            self.producer.flush()\n"
                "            for one in self.sent:"
                "  # without a producer name, flush() raises no error of an entry\n"
                "                one.result()\n",
                "            pass\n",
            ),
        ),
        killers=(killer(ATTEMPTS, "test_accepted_and_unwritten_entries_are_waited_for"),),
    ),
    Mutant(
        name="one producer name for all queries",
        promise="Two queries with one sink id do not drop the rows of each other.",
        edits=(
            Edit(
                WRITE_OPTIONS,
                '        return replace(self.sink, sink_id=f"{self.sink.sink_id}-{identity}")\n',
                "        return replace(self.sink)\n",
            ),
        ),
        killers=(
            killer(
                TOPIC_WRITE, "test_two_queries_or_batches_or_tasks_take_no_rows_from_each_other"
            ),
        ),
    ),
    Mutant(
        name="look for no rows of another query",
        promise="A second query with a sink id is refused before its first row.",
        edits=(Edit(CLAIM, "                if found:\n", "                if False:\n"),),
        killers=(
            killer(
                CLAIMS,
                "test_a_second_query_is_refused_before_its_first_row_wherever_the_first_has_rows",
            ),
        ),
    ),
    Mutant(
        name="store the first rows after the lock of the sink id",
        promise="Of two queries with a sink id that start at once, one stores rows.",
        edits=(Edit(CLAIM, "                yield\n                return\n", ""),),
        killers=(
            killer(
                CLAIMS, "test_the_first_rows_are_stored_before_another_writer_looks_for_queries"
            ),
        ),
    ),
    Mutant(
        name="number the rows of a stream by the attempt",
        promise="All attempts of a task give its rows the same ids.",
        edits=(
            Edit(
                STREAM_WRITER,
                '            batch_id = int(_property(context, "streaming.sql.batchId"))\n',
                "            batch_id = context.attemptNumber()\n",
            ),
        ),
        killers=(killer(TOPIC_WRITE, "test_each_attempt_of_a_task_gives_its_rows_the_same_ids"),),
    ),
    Mutant(
        name="number the rows of a batch write by the attempt",
        promise="All attempts of a task give its rows the same ids.",
        edits=(
            Edit(
                TOPIC_WRITER,
                "self._write.store(rows, self._write_id, 0, context.partitionId(), new=new)",
                "self._write.store(rows, self._write_id, context.attemptNumber(), "
                "context.partitionId())",
            ),
        ),
        killers=(killer(TOPIC_WRITE, "test_each_attempt_of_a_task_gives_its_rows_the_same_ids"),),
    ),
    Mutant(
        name="believe that a name which the broker does not know is new",
        promise="Rows of a name that the broker has forgotten are found at the end of the topic.",
        edits=(
            Edit(
                "keyshard/publishing/batch_writer.py",
                "return self._name is not None and not new and not knows",
                "return False",
            ),
        ),
        killers=(
            killer(
                ATTEMPTS,
                "test_rows_of_a_name_that_the_broker_has_forgotten_are_found_at_the_end_of_the_topic",
            ),
        ),
    ),
    Mutant(
        name="believe the ids of a broker before 5.0",
        promise="A broker that recovered too few ids stores no row of a repeated batch twice.",
        edits=(
            Edit(
                "keyshard/publishing/batch_writer.py",
                "NOTHING and part.producer.knows_every_id",
                "NOTHING",
            ),
        ),
        killers=(
            killer(ATTEMPTS, "test_a_broker_that_recovered_too_few_ids_stores_nothing_twice"),
            killer("simulation/test_pipeline", "test_the_promises_hold_and_every_fault_hits_tasks"),
        ),
    ),
    Mutant(
        name="send unconfirmed rows again to a broker before 5.0",
        promise="A broker that recovered too few ids stores no row twice after a lost connection.",
        edits=(
            Edit(
                UNCONFIRMED,
                "            if self._entries or last < self._sent_last:\n"
                "                raise UnsureError\n",
                "",
            ),
        ),
        killers=(
            killer(ATTEMPTS, "test_rows_that_a_broker_may_have_stored_are_looked_for_first"),
            killer(ATTEMPTS, LOOKED_AGAIN + "[True]"),
        ),
    ),
    Mutant(
        name="believe a look before the producer was opened again",
        promise="Rows that another attempt stores after the look are looked for again.",
        edits=(Edit(UNCONFIRMED, "            self._unsure = True\n", "            pass\n"),),
        killers=(killer(ATTEMPTS, LOOKED_AGAIN + "[False]"),),
    ),
    Mutant(
        name="stage rows that the broker refuses",
        promise="A row that is too large is not staged, so a mended query goes on.",
        edits=(
            Edit(
                "spark_adapter/topic_writer.py",
                "                    sink._check_batch(rows, self.options.order_by)\n",
                "                    pass\n",
            ),
        ),
        killers=(
            killer(
                "runtime/test_staging", "test_a_row_that_the_broker_would_refuse_is_not_staged[0]"
            ),
        ),
    ),
    Mutant(
        name="write_batch without the query",
        promise="A query with a new checkpoint does not take its rows for those of the former one.",
        edits=(
            Edit(
                "spark_adapter/writing.py",
                "    return str(found) if found else None\n",
                "    return None\n",
            ),
        ),
        killers=(
            killer(TOPIC_WRITE, "test_batches_of_foreach_batch_are_those_of_their_query_alone"),
        ),
    ),
    Mutant(
        name="one producer name for all writers of a batch",
        promise="Several writers of one batch do not drop the rows of each other.",
        edits=(
            Edit(
                "keyshard/sink.py",
                '        name = f"{self.sink_id}-{partition}"\n',
                '        name = f"{self.sink_id}"\n',
            ),
        ),
        killers=(killer(SINK, "test_writers_of_one_batch_have_names_of_their_own"),),
    ),
    Mutant(
        name="take deduplication for granted",
        promise="Where the broker does not deduplicate, exactly once is refused by name.",
        edits=(
            Edit(
                "keyshard/broker/unconfirmed.py",
                "        return not self.proved and self._confirmed != NOTHING\n",
                "        return False\n",
            ),
        ),
        killers=(killer(SINK, "test_without_deduplication_a_batch_is_refused"),),
    ),
    Mutant(
        name="order the keys of a batch as they come",
        promise="A retry whose keys come in another order gives each row the same id.",
        edits=(
            Edit(
                "keyshard/columns/canonical.py",
                "    ranks = compute.sort_indices(compute.sort_indices(routing.dictionary))"
                ".cast(pa.int64())\n",
                "    ranks = pa.array(range(distinct), pa.int64())\n",
            ),
        ),
        killers=(killer("unit/test_canonical", "test_the_order_of_keys_does_not_matter"),),
    ),
    Mutant(
        name="end a flush at the first producer that has ended",
        promise="A flush waits for the messages of every topic partition.",
        edits=(
            Edit(
                "keyshard/publishing/message_writer.py",
                "with suppress(KeyShardError):  # it has ended: its messages have failed",
                "if True:",
            ),
        ),
        killers=(
            killer(
                "runtime/test_sink_messages",
                "test_a_producer_that_has_ended_takes_no_message_of_others_with_it",
            ),
        ),
    ),
)
