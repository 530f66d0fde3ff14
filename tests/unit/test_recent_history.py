"""Events are checked, written whole and read back."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import pytest

from keyshard.errors import HistoryError
from keyshard.testing.verify.history import KINDS, Event, HistoryWriter, parse_range, read_history

SENT = Event(1.5, "sent", topic="t", partition=0, ledger=3, entry=4, index=0, key="k", seq=5)


def test_a_line_holds_the_fields_that_are_set() -> None:
    assert json.loads(SENT.to_json()) == {
        "t": 1.5,
        "kind": "sent",
        "topic": "t",
        "partition": 0,
        "ledger": 3,
        "entry": 4,
        "index": 0,
        "key": "k",
        "seq": 5,
    }


@pytest.mark.parametrize(
    "event",
    [
        SENT,
        Event(0.0, "sent", topic="t", key="ä\n", seq=0),
        Event(1, "delivered", topic="t", partition=-1, ledger=1, entry=0, index=9, part=3),
        Event(1, "started", batch="b", worker="w"),
        Event(1, "started", topic="t", seq=1),
        Event(1, "acked", topic="t", partition=0, ledger=1, entry=0),
        Event(1, "range_gained", range="0-65535", worker="w", epoch=4),
        Event(1, "checkpointed", batch="b"),
        Event(1, "crashed"),
        Event(1, "disconnected", worker="broker"),
        Event(1, "faults_stopped"),
    ],
    ids=lambda event: event.kind,
)
def test_a_written_checkpoint_is_read_back(event: Event) -> None:
    line = event.to_json()
    assert "\n" not in line
    assert Event.from_json(line) == event
    assert Event.from_json(line.encode()) == event


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"t": NaN, "kind": "crashed"}', "NaN is not a number"),
        (b'{"kind": "crashed"}', "t is missing"),
        (b'{"t": 1}', "kind is missing"),
        (b'{"t": null, "kind": "crashed"}', "t is missing"),
        (b'{"t": "1", "kind": "crashed"}', "t is '1'; it must be of type float"),
        (b'{"t": true, "kind": "crashed"}', "t is True; it must be of type float"),
        (b'{"t": 1, "kind": "crashed", "epoch": 1.0}', "epoch is 1.0; it must be of type int"),
        (b'{"t": 1, "kind": "crashed", "worker": 3}', "worker is 3; it must be of type str"),
        (
            b'{"t": 1, "kind": "exploded"}',
            "'exploded' is not a kind of event.\nRemedy: The kinds are: sent, ",
        ),
        (
            b'{"t": 1, "kind": "crashed", "who": "x"}',
            "'who' is not a field.\nRemedy: The fields are: t, kind, ",
        ),
        (b'{"t": 1, "kind": "sent", "topic": "t"}', "'sent' needs topic and seq, or topic and pos"),
        (b'{"t": 1, "kind": "delivered", "seq": 1}', "'delivered' needs topic and seq"),
        (b'{"t": 1, "kind": "started", "worker": "w"}', "'started' needs a message or a batch"),
        (b'{"t": 1, "kind": "acked", "topic": "t"}', "'acked' needs topic, partition, ledger and"),
        (b'{"t": 1, "kind": "range_lost", "worker": "w"}', "'range_lost' needs range and worker"),
        (b'{"t": 1, "kind": "checkpointed"}', "'checkpointed' needs batch"),
        (b'{"t": 1, "kind": "crashed", "range": "9-1"}', "'9-1' is not a hash range"),
    ],
)
def test_an_invalid_event_is_refused(line: bytes, text: str) -> None:
    with pytest.raises(HistoryError, match=re.escape(text)):
        Event.from_json(line)


@pytest.mark.parametrize("text", ["", "1", "1-", "a-b", "0-65536", "-1-5", "5-4"])
def test_an_invalid_range_is_refused(text: str) -> None:
    with pytest.raises(HistoryError, match="is not a hash range"):
        parse_range(text)


def test_every_kind_has_a_meaning() -> None:
    assert all(meaning and not meaning.endswith(".") for meaning in KINDS.values())


def test_a_history_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    with HistoryWriter(path) as history:
        history.write(SENT)
        assert list(read_history(path)) == [SENT], "it is with the operating system at once"
        history.write_all([Event(2, "crashed"), Event(3, "faults_stopped")])
    with HistoryWriter(path) as history:
        history.write(Event(4, "crashed"))
    assert [event.t for event in read_history(path)] == [1.5, 2, 3, 4]


def test_a_line_that_is_no_event_is_named(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text(f'{SENT.to_json()}\n\n  \n{{"t": 1, "kind": "exploded"}}\n')
    with pytest.raises(
        HistoryError, match=f"Line 4 of {path} is not an event. 'exploded' is not a kind"
    ):
        list(read_history(path))
    with pytest.raises(HistoryError, match=r"nowhere cannot be read: No such file"):
        list(read_history(tmp_path / "nowhere"))
    with pytest.raises(HistoryError, match=r"cannot be written: Is a directory"):
        HistoryWriter(tmp_path)


@pytest.mark.parametrize("length", [1, 20, len(SENT.to_json())])
def test_a_torn_end_is_left_out_where_that_is_asked(tmp_path: Path, length: int) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text(f"{SENT.to_json()}\n{SENT.to_json()[:length]}")
    assert list(read_history(path, torn_end=True)) == [SENT]
    if length < len(SENT.to_json()):
        with pytest.raises(HistoryError, match="Line 2 of"):
            list(read_history(path))
    with HistoryWriter(path) as history:
        history.write(Event(2, "crashed"))
    assert list(read_history(path)) == [SENT, Event(2, "crashed")]


def test_a_torn_end_longer_than_the_searched_part_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text(f'{SENT.to_json()}\n{{"t": "{"x" * 300_000}')
    HistoryWriter(path).close()
    assert list(read_history(path)) == [SENT]


def test_threads_write_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    with HistoryWriter(path) as one, HistoryWriter(path) as other:

        def write(history: HistoryWriter, number: int) -> None:
            for seq in range(200):
                history.write_all(
                    Event(0, "sent", topic=f"{number}", key=key, seq=seq) for key in ("a", "b")
                )

        threads = [
            threading.Thread(target=write, args=(history, number))
            for number, history in enumerate([one, one, other, other])
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    events = list(read_history(path))
    assert len(events) == 4 * 200 * 2
    assert [event.key for event in events] == ["a", "b"] * 800
