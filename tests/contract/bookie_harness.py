"""A real broker under the contract whose Readers take closed ledgers from bookies."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from keyshard.bookkeeper.bookies import Bookies
from keyshard.bookkeeper.reader import StorageReads
from keyshard.broker.port import DEFAULT_READ_OPTIONS, Broker, ReadOptions
from keyshard.broker.wire.broker import WireBroker
from keyshard.config.connection import Connection
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.replicas import Placement
from keyshard.testing.devbroker import DevBroker, DevCluster
from tests.contract.wire_harness import BreakableWireHarness, WireHarness
from tests.helpers import wait_until


class ReadsBookies(WireHarness):
    """Before it opens a Reader, it closes the ledger that is being written."""

    def _read_from(self, dev_broker: DevBroker | DevCluster) -> None:
        self._names: Mapping[str, str] = (
            {} if isinstance(dev_broker, DevCluster) else dev_broker.bookies_map
        )
        self._reads: list[StorageReads] = []
        self.keep_all()

    def broker(self) -> Broker:
        self._brokers.append(_BookieBroker(self, Connection(self._service_url)))
        return self._brokers[-1]

    def reads(self, broker: WireBroker, where: TopicPartition) -> StorageReads:
        """Close all ledgers with entries, and return the ``StorageReads`` for one Reader.

        All entries that are stored now then come from bookies.
        """
        placed: dict[int, Placement] = {}

        def are_closed() -> bool:
            ledgers = self.admin().placed_ledgers(where) or ()
            placed.update((one.id, one.placement) for one in ledgers if one.entries)
            return not any(isinstance(one, str) for one in placed.values())

        if not are_closed():
            self.unload(where)
            wait_until(are_closed)
        self._reads.append(StorageReads(broker, placed, Bookies(self._names), required=True))
        return self._reads[-1]

    @property
    def by_bookies(self) -> int:
        """Number of entries that bookies returned."""
        return sum(sum(one.from_storage.values()) for one in self._reads)

    def close(self) -> None:
        for one in self._reads:
            one.bookies.close()
        super().close()


class BookieHarness(ReadsBookies):
    """A harness on the session's broker, which other harnesses use too."""

    def __init__(self, dev_broker: DevBroker | DevCluster) -> None:
        super().__init__(dev_broker.service_url, dev_broker.admin_url)
        self._read_from(dev_broker)


class BreakableBookieHarness(ReadsBookies, BreakableWireHarness):
    """A harness on a broker that a test may break."""

    def __init__(self, dev_broker: DevBroker) -> None:
        BreakableWireHarness.__init__(self, dev_broker)
        self._read_from(dev_broker)


class _BookieBroker(WireBroker):
    def __init__(self, harness: ReadsBookies, connection: Connection) -> None:
        super().__init__(connection)
        self._opens = partial(harness.reads, WireBroker(connection))

    def reader(
        self,
        topic_partition: TopicPartition,
        start: EntryId,
        how: ReadOptions = DEFAULT_READ_OPTIONS,
    ) -> Any:
        return self._opens(topic_partition).reader(topic_partition, start, how)
