"""Sums of the counts of written batches."""

from __future__ import annotations

from spark_adapter.reports import BATCHES_MAX, _Batches, _Written
from spark_adapter.topic_writer import WrittenBatch


def test_only_the_newest_batches_are_kept_and_all_are_counted() -> None:
    batches, written = _Batches(), _Written()
    for number in range(BATCHES_MAX + 5):
        one = WrittenBatch(number, "exactly-once", 2, 0, 9, 1, 1, 0, f"t-{number}", number / 10)
        written = batches.addInPlace(written, _Written((one,), WrittenBatch.sum([one])))
    assert [one.batch_id for one in written.newest] == list(range(5, BATCHES_MAX + 5))
    assert written.total == WrittenBatch(
        None, "exactly-once", 210, 0, 945, 105, 105, 0, "t-104", 10.4
    )
