"""The verdict on a reading: everything is there, or its absence is named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from tests.streams.values import BAD, NONE, SEPARATED, Sent, wrong
from tests.ways import facts
from tests.ways.draw import (
    ALL,
    BYTES,
    CLIENT,
    HANDLERS,
    METADATA,
    PLANS,
    SPARK,
    STREAMS,
    Published,
    Reading,
)
from tests.ways.kinds import KINDS, Kind, plain
from tests.ways.outcome import Outcome

CHUNKED = "KEYSHARD_CHUNKED_MESSAGE"
ENCRYPTED = "KEYSHARD_ENCRYPTED_MESSAGE"
MALFORMED = "KEYSHARD_MALFORMED_MESSAGE"
SCHEMA = "KEYSHARD_SCHEMA"


def verdict(made: Published, how: Reading, out: Outcome) -> list[str]:
    """Return the defects of a reading; empty if there are none."""
    sent = {one.number: one for one in made.sent}
    counted = Counter(int(row["n"]) for row in out.rows)
    problems = list(out.problems)
    problems += [f"{number} came {times} times" for number, times in counted.items() if times > 1]
    problems += [f"{number} was never published" for number in counted if number not in sent]
    problems += [f"encrypted {number} was handed out" for number in made.encrypted & {*counted}]
    late = set() if how.way in PLANS else made.later
    problems += [f"{number} came before its time" for number in late & {*counted}]
    for row in out.rows:
        problems += _stored(made, how, sent.get(row["n"]), row)
    problems += [f"data of {number} is refused" for number in out.malformed - hazards(made)]
    if out.error or out.code:
        return [*problems, *_error(made, how, out)]
    if out.is_late:
        return problems
    owed = {*sent} - late - (made.soon if how.ends else set())
    problems += _absent(made, how, out, owed, owed - {*counted})
    for row in out.rows:
        one = sent.get(int(row["n"]))
        if one is not None and (output := _row(made, how, one, row)):
            problems.append(f"{one.number}: {output}")
    return problems


def disagreement(first: tuple[Reading, Outcome], second: tuple[Reading, Outcome]) -> list[str]:
    """Return the columns in which two readings of one topic differ."""
    (one_way, one), (other_way, other) = first, second
    by_number = {row["n"]: row["facts"] for row in one.rows}
    by_client = CLIENT in (one_way.transport, other_way.transport)
    return [
        f"{row['n']}: {one_way.way} and {other_way.way} differ: {differ}"
        for row in other.rows
        if row["n"] in by_number
        and (differ := facts.differing(by_number[row["n"]], row["facts"], by_client=by_client))
    ]  # fmt: skip


def hazards(made: Published) -> set[int]:
    """Return the messages that some schema of the topic does not fit."""
    newest_is_bad = BAD in made.topic.versions
    return {
        one.number
        for one in made.sent
        if one.number not in made.encrypted
        and made.kind != NONE
        and (one.corrupt or (newest_is_bad and not one.tombstone))
    }


def _decodes(how: Reading) -> bool:
    """Whether a reading needs the values decoded."""
    if how.columns == BYTES or how.way in ("batches", "ray"):
        return False
    # Spark reads all columns of a table, even if a query selects fewer.
    return how.columns != METADATA or how.way in ("table", "table stream")


def _stored(made: Published, how: Reading, one: Sent | None, row: Mapping[str, Any]) -> list[str]:
    """Compare what a reader gets without decoding."""
    if one is not None and "raw" in row and row["raw"] != one.payload:
        return [f"{one.number}: the bytes are {row['raw']!r}, not {one.payload!r}"]
    wanted = made.facts.get(row["n"], {})
    differ = facts.differing(wanted, row["facts"], by_client=how.transport == CLIENT)
    return [f"{row['n']}: published and read differ: {differ}"] if differ else []


def _error(made: Published, how: Reading, out: Outcome) -> list[str]:
    """Return a defect if this topic cannot cause the error that ended the reading."""
    allowed = {CHUNKED} if made.chunked else set()
    if made.encrypted and not how.skips_encrypted:
        allowed.add(ENCRYPTED)
    if hazards(made) and how.mode in ("FAILFAST", "") and _decodes(how):
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
    skipped = made.skipped(how)
    if out.counts.get("encryptedSkipped", 0) != skipped:
        problems.append(f"{skipped} encrypted entries are left out, counted: {out.counts}")
    left = gone - locked
    dropped = left & hazards(made) if how.mode == "DROPMALFORMED" and _decodes(how) else set()
    left -= dropped
    output = out.counts.get("malformedDropped", 0)
    if how.way in STREAMS and len(dropped) != output:
        problems.append(f"{len(dropped)} malformed rows left out, {output} counted")
    if left:
        problems.append(f"{sorted(left)} are left out without a word")
    if how.way in HANDLERS:
        taken = {one.number for one in made.sent if one.corrupt} & owed - out.malformed - gone
        problems += [f"data of malformed {number} is not refused" for number in taken]
    if how.mode == "FAILFAST" and _decodes(how) and how.columns != METADATA:
        surely = {one.number for one in made.sent if one.corrupt} & hazards(made) & owed
        if surely:
            problems.append(f"malformed {sorted(surely)} and no error")
    return problems


def _row(made: Published, how: Reading, one: Sent, row: Mapping[str, Any]) -> str:
    if not _decodes(how) or how.columns == METADATA:
        return ""
    hazard = one.number in hazards(made)
    if hazard and (not one.corrupt or how.way not in SPARK):
        return ""  # which versions fit one another is tested elsewhere
    mode = how.mode if how.way in SPARK else "FAILFAST"
    shown = {name: value for name, value in row.items() if name not in ("raw", "facts", "n")}
    if how.columns != ALL:
        shown.pop("_corrupt_record", None)
    # In a handler, the data of a tombstone is None, unless its key stands apart.
    if how.way in HANDLERS and one.tombstone and made.kind != SEPARATED:
        return f"a tombstone has {shown}" if {*shown.values()} - {None} else ""
    if not shown:
        return "it has no columns"
    if KINDS[made.kind].row is None:
        return wrong(one, _hexed(shown), mode, any_malformed=BAD in made.topic.versions)
    return _differs(KINDS[made.kind], one, shown, mode)


def _differs(kind: Kind, one: Sent, row: Mapping[str, Any], mode: str) -> str:
    """Compare a row with the columns of its kind."""
    assert kind.row is not None
    wanted = kind.row(one.number)
    if one.corrupt and mode != "PERMISSIVE":
        return f"a malformed row in mode {mode}"
    if one.corrupt or one.tombstone:
        wanted = dict.fromkeys(wanted)
    found = {name: plain(value) for name, value in row.items()}
    corrupt = found.pop("_corrupt_record", one.payload if one.corrupt else None)
    if corrupt != (one.payload if one.corrupt else None):
        return f"the corrupt bytes are {corrupt!r}"
    return "" if found == wanted else f"the columns are {found}, not {wanted}"


def _hexed(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: {"hex": value.hex()} if isinstance(value, bytes) else value
        for name, value in row.items()
    }
