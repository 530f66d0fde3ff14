"""The verdict on a reading: everything is there, or its absence is named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from tests.streams.values import BAD, NONE, Sent, wrong
from tests.ways.draw import ALL, METADATA, PLANS, SPARK, STREAMS, Published, Reading
from tests.ways.read import Outcome

ENCRYPTED = "KEYSHARD_ENCRYPTED_MESSAGE"
MALFORMED = "KEYSHARD_MALFORMED_MESSAGE"
SCHEMA = "KEYSHARD_SCHEMA"


def verdict(made: Published, how: Reading, out: Outcome) -> list[str]:
    """The defect; empty if there is none."""
    sent = {one.number: one for one in made.sent}
    counted = Counter(int(row["n"]) for row in out.rows)
    problems = [f"{number} came {times} times" for number, times in counted.items() if times > 1]
    problems += [f"{number} was never published" for number in counted if number not in sent]
    problems += [f"encrypted {number} was handed out" for number in made.encrypted & {*counted}]
    late = set() if how.way in PLANS else made.later
    problems += [f"{number} came before its time" for number in late & {*counted}]
    if out.error or out.code:
        return [*problems, *_error(made, how, out)]
    owed = {*sent} - late - (made.soon if how.ends else set())
    problems += _absent(made, how, out, owed, owed - {*counted})
    for row in out.rows:
        one = sent.get(int(row["n"]))
        if one is not None and (output := _row(made, how, out, one, row)):
            problems.append(f"{one.number}: {output}")
    return problems


def hazards(made: Published) -> set[int]:
    """Messages that some schema of the topic does not fit."""
    newest_is_bad = BAD in made.topic.versions
    return {
        one.number
        for one in made.sent
        if one.number not in made.encrypted
        and made.kind != NONE
        and (one.corrupt or (newest_is_bad and not one.tombstone))
    }


def _error(made: Published, how: Reading, out: Outcome) -> list[str]:
    """An error is right where it names something that the topic has."""
    allowed = set()
    if made.encrypted and not how.skips_encrypted:
        allowed.add(ENCRYPTED)
    # Spark has every column of a table read, whichever it selects.
    decodes = how.columns != METADATA or how.way in ("table", "table stream")
    if hazards(made) and how.mode in ("FAILFAST", "") and decodes:
        allowed.add(MALFORMED)
    if BAD in made.topic.versions:
        allowed |= {SCHEMA, "KEYSHARD_BAD_OPTION"}
    if out.code in allowed:
        return []
    return [
        f"ended with {out.code or 'no code'}, one of {sorted(allowed)} expected: {out.error[:600]}"
    ]


def _absent(
    made: Published, how: Reading, out: Outcome, owed: set[int], gone: set[int]
) -> list[str]:
    problems = []
    locked = gone & made.encrypted
    if locked and not how.skips_encrypted:
        problems.append(f"encrypted {sorted(locked)} are left out without an error")
    if locked and how.skips_encrypted and out.counts.get("encryptedSkipped", 0) == 0:
        problems.append(f"encrypted {sorted(locked)} are left out and not counted: {out.counts}")
    left = gone - locked
    if how.mode == "DROPMALFORMED":
        dropped = left & hazards(made)
        left -= dropped
        output = out.counts.get("malformedDropped")
        if how.way in STREAMS and dropped and output != len(dropped):
            problems.append(f"{len(dropped)} malformed rows left out, {output} counted")
    if left:
        problems.append(f"{sorted(left)} are left out without a word")
    if how.mode == "FAILFAST" and how.columns != METADATA:
        surely = {one.number for one in made.sent if one.corrupt} & hazards(made) & owed
        if surely:
            problems.append(f"malformed {sorted(surely)} and no error")
    return problems


def _row(made: Published, how: Reading, out: Outcome, one: Sent, row: Mapping[str, Any]) -> str:
    if "raw" in row and row["raw"] != one.payload:
        return f"the bytes are {row['raw']!r}, not {one.payload!r}"
    if how.columns == METADATA or how.way in ("batches", "ray"):
        return ""
    if how.way in ("embedded", "handlers"):
        if one.number in hazards(made):
            return ""
        return wrong(one, _hexed(row), "FAILFAST")
    mode = how.mode if how.way in SPARK else "FAILFAST"
    if one.number in hazards(made) and not one.corrupt:
        return ""  # which versions fit one another is tested elsewhere
    shown = _hexed(row)
    if how.columns != ALL:
        shown.pop("_corrupt_record", None)
    return wrong(one, shown, mode, any_malformed=BAD in made.topic.versions)


def _hexed(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: {"hex": value.hex()} if isinstance(value, bytes) else value
        for name, value in row.items()
    }
