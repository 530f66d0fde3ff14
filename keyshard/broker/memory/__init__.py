"""An in-memory broker behind the port, for tests: keyshard's own and those of its users.

:class:`MemoryCluster` is the broker's side, shared by everybody; :class:`MemoryBroker` is one
client connection to it. ``tests/contract`` runs the same cases here and on a real broker::

    cluster = MemoryCluster()
    topic = cluster.create_topic("orders", partitions=5)
    cluster.publish(topic, Message(b"first", key="a"), Message(b"second", key="a"))
    broker = MemoryBroker(cluster)

What it shares with Pulsar 4.0, because programs get it wrong:

- A batch goes whole to the range of its first key; a keyless entry goes by producer and
  sequence id.
- Positions inside a range are not monotonic: slots that wait for their owner are overtaken by
  slots that do not. Within a slot order is kept.
- A range that nobody covers, or whose client queue is full, fills the replay queue; then all ranges
  of the topic partition stop (:class:`LookAhead`). Acknowledging what waits does not help before
  the mark-delete passes it.
- A consumer that closes or reconnects gives back what it has not acknowledged, and it is delivered
  again from the first index. When the last one leaves, the cursor rewinds to its mark-delete.
- Subscribing to a topic that does not exist creates it, without partitions. So does a consumer
  whose topic is deleted: it reconnects.
- A consumer with 50,000 unacknowledged messages gets no more, and with 200,000 nobody gets anything
  new (:class:`UnackedLimits`).
- A second owner of a range is refused while the first one's client answers.
- Markers and aborted messages are stored and count as backlog until their turn comes, and nobody
  receives them. A chunked message is several entries and is refused.

What a test can make happen:

- ``cluster.crash()``: the broker is killed and forgets what was acknowledged since it wrote the
  cursor (every ``cursor_write_ms``); all consumers reconnect, ledgers roll over.
- ``cluster.unload(topic)``: the same without forgetting, for one topic or topic partition.
- ``broker.kill()``: a client is killed and loses the acknowledgements that it grouped
  (``ack_group_ms``); ``broker.close()`` sends them.
- ``broker.freeze()`` and ``thaw()``: a client is stopped and goes on.
- ``broker.drop()`` and ``reconnect()``: a connection is away for a while.
- ``broker.disconnect()``, ``consumer.disconnect()``: a connection, or one consumer, reconnects.
- ``cluster.deliver_again(...)``: entries come twice without a fault.
- ``cluster.acknowledge(...)``, ``acknowledge_indices(...)``: somebody else acknowledges entries, or
  parts of a batch, whose rest alone comes at the next delivery.
- ``cluster.publish_marker(...)``, ``publish_aborted(...)``, ``publish_chunked(...)``.
- ``cluster.corrupt(...)``: entries cannot be read.
- ``cluster.publish(..., encrypted=True)``: messages that nobody here has the keys of.
- ``cluster.roll_ledger(...)``, ``trim(...)``, ``wipe()``: after the last, ledger ids begin again.

What it does not do: negative acknowledgement and delayed messages.

Time is virtual: ``now_ms`` of the cluster is its only clock, and nothing here starts a thread or
sleeps. What is due by the clock happens when somebody next calls the cluster or a handle; entries
are dispatched in the thread that publishes, receives, acknowledges or subscribes. Only a
``receive`` or ``read`` that is told to wait does so in real time, and a ``send`` that has no
connection. The same calls in the same order do the same.
"""

from __future__ import annotations

from keyshard.broker.memory.client import MemoryConsumer, MemoryReader
from keyshard.broker.memory.cluster import MemoryCluster
from keyshard.broker.memory.connection import MemoryBroker
from keyshard.broker.memory.limits import LookAhead, UnackedLimits
from keyshard.broker.memory.log import Batching, Message
from keyshard.broker.memory.producer import MemoryProducer

__all__ = [
    "Batching",
    "LookAhead",
    "MemoryBroker",
    "MemoryCluster",
    "MemoryConsumer",
    "MemoryProducer",
    "MemoryReader",
    "Message",
    "UnackedLimits",
]
