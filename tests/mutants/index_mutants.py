"""Mutants of the index of closed ledgers."""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant, killer

INDEX_ROWS = killer(
    "runtime/test_ledger_index", "test_the_rows_are_those_of_a_read_without_an_index"
)

OF_INDEX = (
    Mutant(
        name="rule out a zone whose greatest time is the start of a read",
        promise="Exactly the wanted rows: a zone with a wanted message is read.",
        edits=(
            Edit(
                "keyshard/core/position/zones.py",
                "(start is not None and greatest < start)",
                "(start is not None and greatest <= start)",
            ),
        ),
        killers=(killer("property/test_zones", "test_a_zone_with_a_wanted_message_is_kept"),),
    ),
    Mutant(
        name="make zones of the rows that a read returns",
        promise="Exactly the wanted rows: the bounds of a zone contain all its messages.",
        edits=(
            Edit(
                "keyshard/reading/split_reader.py",
                "        if zones is not None:\n            zones.add(block)\n"
                "        if split.matches(block.publish_ms):\n",
                "        if split.matches(block.publish_ms):\n"
                "            if zones is not None:\n                zones.add(block)\n",
            ),
            Edit(
                "keyshard/reading/zone_builder.py",
                "        if self._entries != end - first:\n            return None\n",
                "",
            ),
        ),
        killers=(INDEX_ROWS,),
    ),
    Mutant(
        name="keep the zones of a topic that was created again",
        promise="Exactly the wanted rows: an index that does not fit is found out.",
        edits=(
            Edit(
                "keyshard/reading/ledger_index.py",
                "if _is_of(storage, said) else _SCHEMA.empty_table()",
                "",
            ),
        ),
        killers=(
            killer(
                "runtime/test_ledger_index",
                "test_zones_of_a_topic_that_was_created_again_are_dropped",
            ),
        ),
    ),
    Mutant(
        name="keep the zones of a ledger with another size",
        promise="Exactly the wanted rows: an index that does not fit is found out.",
        edits=(
            Edit(
                "keyshard/reading/ledger_index.py",
                "storage.closed.get(ledger) == (entries, size)",
                "ledger in storage.closed",
            ),
        ),
        killers=(
            killer(
                "runtime/test_ledger_index",
                "test_zones_of_ledgers_with_another_size_or_that_are_gone_are_dropped",
            ),
        ),
    ),
    Mutant(
        name="read the start of a stretch from the middle of its first entry that is left",
        promise="Exactly the wanted rows: only the first entry of a read begins inside.",
        edits=(
            Edit(
                "keyshard/core/position/split.py",
                "first_index=self.first_index if found.first == self.first else 0,",
                "first_index=self.first_index,",
            ),
        ),
        killers=(
            killer(
                "property/test_zones",
                "test_the_parts_of_a_stretch_cover_all_entries_that_are_not_ruled_out",
            ),
        ),
    ),
)
