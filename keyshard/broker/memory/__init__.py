"""An in-memory broker behind the port, for tests: keyshard's own and those of its users.

:class:`MemoryCluster` is the broker's side, shared by all clients. :class:`MemoryBroker` is one
client connection to it. ``tests/contract`` runs the same cases here and on a real broker::

    cluster = MemoryCluster()
    topic = cluster.create_topic("orders", partitions=5)
    cluster.publish(topic, Message(b"first", key="a"), Message(b"second", key="a"))
    broker = MemoryBroker(cluster)

Behaviour of Pulsar that it reproduces, because programs often get it wrong, by default that of
5.0.1 (``MemoryCluster(version="4.0.8")``; :mod:`keyshard.core.releases` has the differences):

- A batch goes whole to the range of its first key. A keyless entry is routed by producer and
  sequence id.
- Positions inside a range are not monotonic: slots that wait for their owner are overtaken by
  slots that do not. Within a slot, order is kept.
- Entries of a range without a consumer, or with a full client queue, fill the replay queue. Then
  all ranges of the topic partition stop (:class:`LookAhead`). An acknowledged entry stays in the
  queue, and counts for its limit, until its range has a consumer that could receive it.
- If a consumer closes or reconnects, its unacknowledged entries are redelivered from the first
  index. When the last consumer leaves, the cursor rewinds to its mark-delete.
- Subscribing to a missing topic creates it, without partitions. So does a consumer whose topic is
  deleted, because it reconnects. A partition of a deleted topic is refused.
- A consumer with 50,000 unacknowledged messages gets no more. With 200,000 in a subscription, no
  consumer gets new ones (:class:`UnackedLimits`).
- A topic with ``cluster.deduplicate(topic)`` stores each sequence id of a producer name once. It
  compares only the first id of an entry. A second producer of a name is refused while the client of
  the first one answers.
- A second owner of a range is refused while the client of the first one answers.
- A delayed message waits until a second before its time. Then it goes to its owner, without order
  among the messages of its key. If 50,000 messages wait whose times ascend, all ranges stop.
- Markers and aborted messages are stored and count as backlog until the dispatcher reaches them;
  no consumer receives them. A chunked message spans several entries and is refused.

Faults and events that a test can cause:

- ``cluster.crash()``: the broker is killed and loses the acknowledgements since it wrote the
  cursor (every ``cursor_write_ms``); all consumers reconnect, ledgers roll over.
- ``cluster.unload(topic)``: the same without the loss, for one topic or topic partition.
- ``broker.kill()``: a client is killed and loses the acknowledgements that it grouped
  (``ack_group_ms``); ``broker.close()`` sends them.
- ``broker.freeze()`` and ``thaw()``: a client is suspended and resumes.
- ``broker.drop()`` and ``reconnect()``: a connection is lost for a while.
- ``broker.disconnect()``, ``consumer.disconnect()``: a connection, or one consumer, reconnects.
- ``cluster.deliver_again(...)``: entries are delivered twice without a fault.
- ``cluster.acknowledge(...)``, ``acknowledge_indices(...)``: another client acknowledges entries,
  or parts of a batch; only the rest of the batch is delivered next time.
- ``cluster.publish_marker(...)``, ``publish_aborted(...)``, ``publish_chunked(...)``.
- ``cluster.corrupt(...)``: entries cannot be read.
- ``cluster.publish(..., encrypted=True)``: messages for which no client has the keys.
- ``cluster.hold_writes(...)``, ``release_writes(...)``, ``fail_writes(...)``: entries are accepted
  and stored later, or never.
- ``cluster.forget_producer(...)``: the broker forgets the sequence ids of a producer name.
- ``cluster.exceed_quota(...)``: entry producers of a topic are refused.
- ``cluster.roll_ledger(...)``, ``trim(...)``, ``wipe()``: after the last, ledger ids begin again.

Not supported: negative acknowledgement.

Time is virtual: ``now_ms`` of the cluster is its only clock. This package starts no thread and does
not sleep. Due events happen at the next call of the cluster or of a handle. Entries are dispatched
in the thread that publishes, receives, acknowledges or subscribes. Only a ``receive`` or ``read``
with a timeout waits in real time, and a ``send`` without a connection. The same calls in the same
order have the same results.
"""

from __future__ import annotations

from keyshard.broker.memory.client import MemoryConsumer, MemoryReader
from keyshard.broker.memory.cluster import MemoryCluster
from keyshard.broker.memory.connection import MemoryBroker
from keyshard.broker.memory.entry_producer import MemoryEntryProducer
from keyshard.broker.memory.limits import LookAhead, UnackedLimits
from keyshard.broker.memory.log import Batching, Message
from keyshard.broker.memory.producer import MemoryProducer

__all__ = [
    "Batching",
    "LookAhead",
    "MemoryBroker",
    "MemoryCluster",
    "MemoryConsumer",
    "MemoryEntryProducer",
    "MemoryProducer",
    "MemoryReader",
    "Message",
    "UnackedLimits",
]
