"""Mutants of reads from bookies."""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant, killer

BOOKIES = "keyshard/bookkeeper/bookies.py"
BOOKIE_READER = "keyshard/bookkeeper/reader.py"
BELONGS_TO_BROKER = killer(
    "unit/test_entries_of_transactions",
    "test_entries_of_transactions_and_markers_go_to_the_broker",
)

OF_BOOKIES = (
    Mutant(
        name="blame bookies for the entries of a ledger that was deleted while it was read",
        promise="Deleted ledgers are a named loss, or left out, also if only bookies are read.",
        edits=(
            Edit(
                "keyshard/reading/split_reader.py",
                "            if len(left) == len(split.spans):\n                raise\n",
                "            raise\n",
            ),
        ),
        killers=(
            killer(
                "runtime/test_split_losses",
                "test_a_read_from_bookies_alone_goes_on_behind_a_ledger_that_is_deleted_meanwhile",
            ),
        ),
    ),
    Mutant(
        name="take an entry from a bookie without a look at its digest",
        promise="The same rows as by the broker: a wrong digest means the next replica.",
        edits=(
            Edit(
                "keyshard/bookkeeper/protocol.py",
                "        or digested != _crc32c(frame)\n",
                "",
            ),
        ),
        killers=(
            killer(
                "unit/test_bookies_batch_reads", "test_responses_to_batch_reads_may_end_anywhere"
            ),
        ),
    ),
    Mutant(
        name="forget the entries that the answer to a batch read left out",
        promise="A read from bookies is complete without another replica.",
        edits=(
            Edit(
                BOOKIES,
                "                bookie.rests[next_entry] = end - next_entry\n",
                "                pass\n",
            ),
        ),
        killers=(
            killer(
                "unit/test_bookies",
                "test_entries_that_arrive_before_their_turn_take_no_more_memory_than_allowed",
            ),
        ),
    ),
    Mutant(
        name="try a batch read first with each split at a bookie that refuses them",
        promise="A process remembers for 60 s which bookies refuse batch reads.",
        edits=(
            Edit(
                BOOKIES,
                "            if self._failures.is_single(key):\n",
                "            if False:\n",
            ),
        ),
        killers=(
            killer(
                "unit/test_bookies_batch_reads",
                "test_a_bookie_that_refuses_batch_reads_is_named_once_and_remembered",
            ),
        ),
    ),
    Mutant(
        name="request entries as if those of a bookie followed each other",
        promise="A bookie of a striped ledger is asked only for entries that it stores.",
        edits=(
            Edit(
                BOOKIES,
                "        consecutive = entries[-1] - entries[0] == len(entries) - 1\n",
                "        consecutive = True\n",
            ),
        ),
        killers=(
            killer(
                "unit/test_bookies_batch_reads",
                "test_a_bookie_is_only_asked_for_entries_that_it_stores",
            ),
        ),
    ),
    Mutant(
        name="take markers from bookies",
        promise="The same rows as by the broker, which alone knows which entries are visible.",
        edits=(Edit(BOOKIE_READER, '{20: b"\\xa0\\x01", 22:', "{22:"),),
        killers=(BELONGS_TO_BROKER,),
    ),
    Mutant(
        name="take entries of transactions from bookies if the broker added metadata",
        promise="The same rows as by the broker, also of topics with broker metadata.",
        edits=(
            Edit(
                BOOKIE_READER,
                "if _MAY_BELONG.search(metadata) and ",
                "if position == raw.position and _MAY_BELONG.search(metadata) and ",
            ),
        ),
        killers=(BELONGS_TO_BROKER,),
    ),
    Mutant(
        name="take entries of transactions from bookies behind the first one",
        promise="The same rows as by the broker: it is asked from the first such entry on.",
        edits=(
            Edit(
                BOOKIE_READER,
                '            return found, "it has entries of transactions or markers"\n',
                "            continue\n",
            ),
        ),
        killers=(
            BELONGS_TO_BROKER,
            killer(
                "unit/test_entries_of_transactions",
                "test_the_broker_is_asked_from_the_first_such_entry_on",
            ),
        ),
    ),
    Mutant(
        name="leave each ledger to the broker whose keys look like tags of transactions",
        promise="Closed ledgers are read without the broker.",
        edits=(
            Edit(
                BOOKIE_READER,
                " and _belongs_to_broker(metadata):",
                ":",
            ),
        ),
        killers=(
            killer(
                "unit/test_entries_of_transactions",
                "test_bytes_that_only_look_like_these_fields_are_read_from_bookies",
            ),
        ),
    ),
)
