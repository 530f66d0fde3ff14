"""Tries an installed keyshard: decodes an entry, reads a topic in memory and calls the command.

Run it with the interpreter of the environment and the decoder that it must have:
``python smoke_test.py compiled`` or ``python smoke_test.py python``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import keyshard
from keyshard.broker.connect import decoded_in_python, decoder_of
from keyshard.broker.memory import MemoryCluster, Message
from keyshard.broker.wire import native_decoder, native_encoder
from keyshard.broker.wire.decoding import decode
from keyshard.broker.wire.encoding import EntryHead, encoded
from keyshard.broker.wire.entries import RawEntry
from keyshard.columns.outgoing import OutgoingMessage
from keyshard.core.position.entry import EntryId, TopicPartition

_COMMAND_S = 60
_MESSAGES = 100


def _check_decoder(wanted: str) -> None:
    found = decoder_of(keyshard.Connection())
    assert found == wanted, f"entries are decoded by {found} code"
    assert native_encoder.is_available() == (wanted == "compiled")
    rows = [OutgoingMessage(b"%d" % number, "k17", None, None, None) for number in range(3)]
    data = encoded(rows, EntryHead(b"smoke", 1_700_000_000_000), 0)
    entries = [RawEntry(EntryId(1, 0), redelivered=False, ack_set=(), data=data, position=0)]
    by_compiled_code = native_decoder.decode(entries, keeps_values=True)
    assert (by_compiled_code is not None) == (wanted == "compiled")
    (block,) = decode(entries, TopicPartition("persistent://public/default/smoke", 0)).blocks
    assert block.content.column("value").to_pylist() == [b"0", b"1", b"2"]


def _read_topic() -> None:
    cluster = MemoryCluster.named("smoke")
    topic = cluster.create_topic("orders", partitions=5)
    keys = [str(number % 7) for number in range(_MESSAGES)]
    cluster.publish(topic, *(Message(b"%d" % at, key=key) for at, key in enumerate(keys)))
    source = keyshard.KeyShardSource(
        topic, subscription="smoke", starting_position="earliest", service_url="memory://smoke"
    )
    seen: list[int] = []
    with source.open() as stream:
        while len(seen) < _MESSAGES:
            batch = stream.next_batch(timeout_s=10)
            assert batch is not None, f"{len(seen)} of {_MESSAGES} messages came"
            seen += [int(value) for rows in batch for value in rows["value"].to_pylist()]
            stream.commit(batch)
    assert sorted(seen) == list(range(_MESSAGES))


def _call_command() -> None:
    command = Path(sys.executable).with_name("keyshard")
    called = subprocess.run(
        [str(command), "--help"], check=True, capture_output=True, text=True, timeout=_COMMAND_S
    )
    assert "doctor" in called.stdout, called.stdout


def main(wanted: str) -> None:
    """Try everything.

    Raises:
        AssertionError: The install does not do what it must.
    """
    where = Path(keyshard.__file__)
    checkout = Path(__file__).resolve().parents[1]
    assert not where.is_relative_to(checkout), f"{where} is in the checkout, not installed"
    _check_decoder(wanted)
    _read_topic()
    _call_command()
    decoded = decoded_in_python() if wanted == "python" else "Compiled code decodes entries."
    print(f"keyshard {keyshard.__version__} works. {decoded}")


if __name__ == "__main__":
    main(sys.argv[1])
