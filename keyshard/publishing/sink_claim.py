"""Gives a sink id of a topic to one query.

The names of stored entries say which query stored them. So a query without rows in a topic looks
for entries of another query with its sink id, and then stores its first rows. A producer without
messages serves as the lock for that, so of two queries that start at once only one stores rows.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

from keyshard.broker.port import Broker, EntryProducer, PublishOptions
from keyshard.core.position.entry import TopicPartition
from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import SinkIdInUseError
from keyshard.publishing.topic_tail import queries_at_end


@dataclass(frozen=True, slots=True)
class Claim:
    """A sink id that a query has for itself."""

    sink_id: str
    query: str

    @contextmanager
    def checked(
        self,
        broker: Broker,
        producers: Sequence[EntryProducer],
        schema: TopicSchema | None,
        timeout_s: float,
    ) -> Iterator[None]:
        """Check that no other query has the sink id.

        If no query has rows in the topic, no other writer can check it before the block ends.

        Args:
            broker: An open connection.
            producers: Those of the query in the topic, at least one.
            schema: Schema of its messages.
            timeout_s: Longest time for each topic partition, seconds.

        Raises:
            SinkIdInUseError: Another query has stored rows in the topic, and this one has not.
            ProducerBusyError: Other writers checked it until the operation timeout (retriable).
            BrokerUnavailableError: Reading took too long (retriable).
        """
        topic = producers[0].topic_partition.topic
        where = broker.partitions(topic)
        lock = PublishOptions(f"{self.sink_id}-claim", schema=schema)
        with closing(broker.entry_producer(where[0], lock)):
            found: set[str] = set()
            with closing(_everywhere(broker, producers, where, schema)) as everywhere:
                for one in everywhere:
                    found |= queries_at_end(broker, one, self.sink_id, self.query, timeout_s)
                    if self.query in found:
                        break
            if self.query not in found:
                if found:
                    raise SinkIdInUseError(
                        f"Query {self.query} cannot write to {topic}: sink id {self.sink_id!r} "
                        f"belongs to query {min(found)}, which stored rows there.",
                        "Give this query another sink id, or start it from the checkpoint of "
                        "that query.",
                    )
                yield
                return
        yield


def _everywhere(
    broker: Broker,
    producers: Sequence[EntryProducer],
    where: Sequence[TopicPartition],
    schema: TopicSchema | None,
) -> Generator[EntryProducer, None, None]:
    """Yield a producer of each topic partition, first those that are open."""
    yield from producers
    opened = {one.topic_partition for one in producers}
    for place in where:
        if place in opened:
            continue
        with closing(broker.entry_producer(place, PublishOptions(schema=schema))) as unnamed:
            yield unnamed
