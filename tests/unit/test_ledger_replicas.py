"""The bookies that store a ledger, by its metadata."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyshard.core.position.replicas import (
    BOOKIES_MAX,
    ENSEMBLES_MAX,
    METADATA_MAX,
    LedgerReplicas,
    Placement,
    replicas_of,
)
from tests.support.deadlines import deadline
from tests.support.scripted_bookie import LEDGER

names = st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=5, unique=True)


@given(names=names, data=st.data(), entry=st.integers(0, 10_000))
def test_the_bookies_of_an_entry_start_at_its_number_modulo_the_ensemble(
    names: list[str], data: st.DataObject, entry: int
) -> None:
    quorum = data.draw(st.integers(1, len(names)))
    later = data.draw(st.integers(1, 10_000))
    ledger = LedgerReplicas(
        LEDGER, 10_000, quorum, "CRC32C", ((0, tuple(names)), (later, tuple(reversed(names))))
    )
    ensemble = names if entry < later else names[::-1]
    assert ledger.bookies_of(entry) == tuple((ensemble * 2)[entry % len(names) :][:quorum])


@given(firsts=st.sets(st.integers(1, 99), max_size=6), bounds=st.data())
def test_a_part_of_a_ledger_has_the_bookies_of_its_entries(
    firsts: set[int], bounds: st.DataObject
) -> None:
    ensembles = tuple((at, (f"a{at}", f"b{at}")) for at in (0, *sorted(firsts)))
    ledger = LedgerReplicas(LEDGER, 99, 2, "CRC32C", ensembles)
    first = bounds.draw(st.integers(0, 99))
    end = bounds.draw(st.integers(first + 1, 100))
    part = ledger.part(first, end)
    for entry in range(first, end):
        assert part.bookies_of(entry) == ledger.bookies_of(entry)
    assert len(part.ensembles) == len(
        {part.bookies_of(entry)[0][1:] for entry in range(first, end)}
    )


METADATA = (
    "LedgerMetadata{formatVersion=3, ensembleSize=2, writeQuorumSize=2, ackQuorumSize=1, "
    "state=CLOSED, length=377029, lastEntryId=999, digestType=CRC32C, password=OMITTED, "
    "ensembles={0=[127.0.0.1:28107, 127.0.0.1:31452], 512=[127.0.0.1:1, [::1]:2]}, "
    "customMetadata={component=base64:bWFuYWdlZA==, state=OPEN}}"
)


def listed(text: str = METADATA, **more: object) -> Placement:
    return replicas_of({"ledgers": [{"ledgerId": 3, "metadata": text, **more}]})[3]


def test_the_metadata_of_a_ledger_names_its_bookies() -> None:
    assert listed() == LedgerReplicas(
        3, 999, 2, "CRC32C",
        ((0, ("127.0.0.1:28107", "127.0.0.1:31452")), (512, ("127.0.0.1:1", "[::1]:2"))),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (METADATA.replace("CLOSED", "OPEN"), "it is not closed"),
        (METADATA.replace("CLOSED", "IN_RECOVERY"), "it is not closed"),
        (METADATA.replace("CRC32C", "HMAC"), "its digest type HMAC cannot be checked"),
        (METADATA.replace("CRC32C", "DUMMY"), "its digest type DUMMY cannot be checked"),
        (METADATA.replace("writeQuorumSize=2", "writeQuorumSize=3"), "not understood"),
        (METADATA.replace("lastEntryId=999, ", ""), "not understood"),
        (METADATA.replace("{0=", "{1="), "not understood"),
        (METADATA.replace("{0=", "{0=["), "not understood"),
        (METADATA.replace("], 512", "], c], 512"), "not understood"),
        (METADATA.replace("], 512", "], more, 512"), "not understood"),
        ("", "it is not closed"),
        ("LedgerMetadata{state=CLOSED, digestType=CRC32C}", "not understood"),
    ],
)
def test_a_ledger_that_bookies_cannot_give_is_left_to_the_broker(text: str, why: str) -> None:
    found = listed(text)
    assert isinstance(found, str)
    assert why in found


def with_ensembles(*ensembles: str) -> str:
    text = ", ".join(f"{9 * number}=[{names}]" for number, names in enumerate(ensembles))
    return METADATA[: METADATA.index("{0=") + 1] + text + METADATA[METADATA.index("}, custom") :]


def test_a_ledger_with_too_many_ensembles_or_bookies_is_left_to_the_broker() -> None:
    pair = "127.0.0.1:1, [::1]:2"
    found = listed(with_ensembles(*[pair] * ENSEMBLES_MAX))
    assert isinstance(found, LedgerReplicas)
    assert found.ensembles[-1] == (9 * ENSEMBLES_MAX - 9, ("127.0.0.1:1", "[::1]:2"))
    beyond = with_ensembles(*[pair] * (ENSEMBLES_MAX + 1))
    assert listed(beyond) == "it has more than 1,000 ensembles"
    pairs = [f"a:{number}, b:{number}" for number in range(BOOKIES_MAX // 2)]
    found = listed(with_ensembles(*pairs, *pairs))
    assert isinstance(found, LedgerReplicas)
    assert len(found.names) == BOOKIES_MAX
    assert listed(with_ensembles(*pairs, "a:0, c:0")) == "it has more than 100 bookies"
    wide = ", ".join(f"a:{number}" for number in range(BOOKIES_MAX + 1))
    assert listed(with_ensembles(wide)) == "it has more than 100 bookies"


def test_long_metadata_of_a_ledger_is_not_parsed() -> None:
    """Metadata up to the limit is parsed at once, also if it is made to take long."""
    for part in ("0=[", "0=[[", "0=[a, ", "ensembles={", "0=[a], "):
        text = METADATA.replace("{0=", "{" + part * (METADATA_MAX // len(part) - 200) + "0=")
        assert len(text) <= METADATA_MAX
        began_s = time.monotonic()
        assert isinstance(listed(text), str)
        assert time.monotonic() - began_s < deadline(10)
    assert "more than 1,048,576 characters" in str(listed(METADATA + "x" * METADATA_MAX))


def test_an_offloaded_ledger_is_left_to_the_broker() -> None:
    assert listed(offloaded=True) == "it is offloaded"
