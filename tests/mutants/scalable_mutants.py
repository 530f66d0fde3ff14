"""Mutants of scalable topics."""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant, killer

_TESTS = "runtime/test_scalable_topics"

OF_SCALABLE_TOPICS = (
    Mutant(
        name="receive from a segment before its parents are acknowledged",
        promise="Order: the messages of a key in a parent come before those in its children.",
        edits=(
            Edit(
                "keyshard/core/topic_segments.py",
                "        return parents is not None and not parents <= self._ended\n",
                "        return False\n",
            ),
        ),
        killers=(
            killer(_TESTS, "test_rows_of_children_come_after_the_parent_is_acknowledged"),
            killer(_TESTS, "test_a_split_while_the_source_is_down_keeps_the_order"),
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
                "keyshard/broker/wire/segment_watch.py",
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
)
