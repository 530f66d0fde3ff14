"""Looks for topics and topic partitions that come and go while a source runs.

A round::

    1. which topics are named, or match now, and which topic partitions they have
    2. gone      known, and no longer in the metadata: close their consumers, drop what they
                 received, delete what a reconnect of ours brought back, forget what was delivered
    3. new       not known: own every range of them, from their beginning

Our own consumers reconnect within a second after their topic was deleted, and Pulsar creates it
again for them, unless a policy forbids that. A partitioned topic is then missing from the metadata
all the same. One without partitions looks as before, but its storage is new and empty: that tells
it. A topic that others created again between two rounds is told by its storage too. It is let go
and owned anew, because consumers that found no topic do not come back. Those that did may have
received from it before the round: what was delivered stays known, for it may come once more.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from keyshard.broker.port import Admin
from keyshard.coordinator.progress import DiscoveryProgress
from keyshard.coordinator.topics import Catalog
from keyshard.core.position.entry import TopicPartition
from keyshard.core.ring.hash_range import HashRange, gaps
from keyshard.core.subscription_state import SubscriptionState
from keyshard.errors import AdminError, BrokerError, KeyShardError
from keyshard.threads import begin

LEFTOVER_ROUNDS = 3
"""Fewest rounds in which a deleted topic partition is looked after: a consumer may come back."""
LEFTOVER_S = 5.0
"""Shortest time for which it is, seconds."""

_log = logging.getLogger(__name__)


class Owner(Protocol):
    """Who runs the consumers; implemented by :mod:`~keyshard.coordinator.partitions`."""

    def grow(self, found: Collection[TopicPartition]) -> None:
        """Own every range of new topic partitions, from their beginning."""

    def shrink(self, gone: Collection[TopicPartition], *, again: bool) -> None:
        """Close the consumers of topic partitions that exist no more.

        Args:
            gone: The topic partitions.
            again: Whether others of the same names exist, and are to be owned at once.
        """

    def forget(self, gone: TopicPartition) -> None:
        """Nothing more comes of a topic partition of :meth:`shrink`. Idempotent."""

    def standing(self, where: TopicPartition) -> Collection[Any]:
        """The consumers of a topic partition that are connected now."""

    def compare(self, standing: Collection[Any], gaps: Sequence[HashRange]) -> None:
        """Subscribe anew whom the broker does not know.

        Args:
            standing: Who was connected before the broker was asked.
            gaps: Parts of the ring that had no owner then.
        """

    def tidy(self) -> None:
        """Let go of what was only needed to end earlier batches."""

    def fail(self, error: KeyShardError) -> None:
        """Remember the error that ends the source."""


class _Errors:
    """Errors of the steps of a round."""

    def __init__(self) -> None:
        self._all: list[KeyShardError] = []

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep an error of the block for later."""
        try:
            yield
        except KeyShardError as exc:
            self._all.append(exc)

    def raise_first(self) -> None:
        """Raise the first error that was kept, if any."""
        if self._all:
            raise self._all[0]


class Discovery:
    """One daemon thread; its errors are those of a round, which is made again.

    Args:
        catalog: Where topics are looked up.
        admin: Admin REST interface, where there is one.
        owner: Told what came and what is gone.
        subscription: Subscription of the source.
        interval_s: Time between two rounds, seconds.
    """

    def __init__(
        self, catalog: Catalog, admin: Admin | None, owner: Owner, subscription: str,
        interval_s: float,
    ) -> None:  # fmt: skip
        self._catalog = catalog
        self._admin = admin
        self._owner = owner
        self._subscription = subscription
        self._interval_s = interval_s
        self._known: set[TopicPartition] = set()
        self._partitioned: set[str] = set()
        self._created: dict[TopicPartition, str] = {}
        self._leftovers: dict[TopicPartition, int] = {}
        self._leftover_rounds = max(LEFTOVER_ROUNDS, math.ceil(LEFTOVER_S / interval_s))
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.discovered = 0
        """Topic partitions found since the start."""
        self.gone = 0
        """Topic partitions that were deleted since the start."""
        self.backlog: int | None = None
        """Entries that the broker held for the subscription at the newest round, over all topic
        partitions; ``None`` when nothing tells."""
        self.error = ""
        """What failed in the newest round."""

    def start(self, known: Iterable[TopicPartition], gone: Iterable[TopicPartition] = ()) -> None:
        """Begin, with what is consumed already and what was found deleted at the start."""
        self._known.update(known)
        self._leftovers.update(dict.fromkeys(gone, self._leftover_rounds))
        self._partitioned.update(
            tp.topic for tp in (*self._known, *self._leftovers) if tp.partition >= 0
        )
        self._recreated(self._known)
        self._thread = begin("keyshard-discovery", self._run, fail=self._owner.fail)

    def stop(self) -> None:
        """End the thread after its round; returns without waiting."""
        self._stopping.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end, at most ``timeout_s`` seconds."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def status(self) -> DiscoveryProgress:
        """Counts since the start, as plain JSON values."""
        return {
            "partitionsDiscovered": self.discovered,
            "partitionsGone": self.gone,
            "discoveryError": self.error,
            "backlogEntries": self.backlog,
        }

    def round(self) -> None:
        """Look once; what failed for one topic does not keep another from being looked at.

        Raises:
            KeyShardError: The first error.
        """
        topics = self._catalog.topics()
        existing: dict[str, tuple[TopicPartition, ...]] = {}
        errors = _Errors()
        for topic in dict.fromkeys([*topics, *(tp.topic for tp in sorted(self._known))]):
            with errors.kept():
                existing[topic] = self._partitions(topic)
        gone = {tp for tp in self._known if tp not in existing.get(tp.topic, (tp,))}
        with errors.kept():
            self._drop(gone, again=False)
        with errors.kept():
            self._drop(self._recreated(self._known), again=True)
        leftovers = set(self._leftovers)
        with errors.kept():
            # The list of existing ones is older: it has the leftovers that this deletes.
            leftovers -= self._clean()
        for topic in topics:
            with errors.kept():
                self._add(tp for tp in existing.get(topic, ()) if tp not in leftovers)
        self._owner.tidy()
        with errors.kept():
            self._look_at_subscriptions()
        errors.raise_first()

    def _look_at_subscriptions(self) -> None:
        """Count the backlog, and see whether the broker has forgotten consumers in silence.

        A topic that is being deleted while somebody subscribes to it may do that.
        """
        if self._admin is None:
            return
        backlog = 0
        for topic_partition in sorted(self._known):
            state = self._state_of(topic_partition)
            backlog += 0 if state is None else state.backlog
            if state is not None and not state.gaps:
                continue
            standing = self._owner.standing(topic_partition)
            if standing and (state := self._state_of(topic_partition)) is not None:
                # Asked after they stood.
                self._owner.compare(standing, state.gaps)
            elif standing and self._creation_of(topic_partition):
                # The topic is there without the subscription.
                self._owner.compare(standing, gaps(()))
        self.backlog = backlog

    def _state_of(self, topic_partition: TopicPartition) -> SubscriptionState | None:
        """What the broker says of the subscription; ``None`` when it has none.

        Raises:
            AdminError: It says something unexpected.
        """
        assert self._admin is not None
        stats = self._admin.subscription(topic_partition, self._subscription)
        try:
            return None if stats is None else SubscriptionState.from_stats(stats)
        except ValueError as exc:
            raise AdminError(
                f"The subscription in {topic_partition} is not understood: {exc}."
            ) from exc

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            self._attempt()

    def _attempt(self) -> None:
        """One round of the thread."""
        try:
            self.round()
        except KeyShardError as exc:
            if not self._stopping.is_set():
                self._report(exc)
        else:
            self.error = ""

    def _report(self, error: KeyShardError) -> None:
        if str(error) != self.error:
            _log.warning("looking for topics failed, and is done again: %s", error)
        self.error = str(error)

    def _partitions(self, topic: str) -> tuple[TopicPartition, ...]:
        found = self._catalog.partitions(topic, was_partitioned=topic in self._partitioned)
        if any(tp.partition >= 0 for tp in found):
            self._partitioned.add(topic)
        return found

    def _drop(self, gone: set[TopicPartition], *, again: bool) -> None:
        if not gone:
            return
        self._owner.shrink(gone, again=again)
        self._known -= gone
        self.gone += len(gone)
        self._leftovers.update(dict.fromkeys(gone, self._leftover_rounds))
        for topic_partition in sorted(gone):
            self._created.pop(topic_partition, None)
            _log.warning(
                "%s is not consumed any more: it was deleted%s",
                topic_partition, " and created again" if again else "",
            )  # fmt: skip

    def _recreated(self, among: Collection[TopicPartition]) -> set[TopicPartition]:
        """Topic partitions of topics whose storage is another one than before."""
        if self._admin is None:
            return set()
        found: set[str] = set()
        firsts = {tp.topic: tp for tp in sorted(among, reverse=True)}
        for topic, first in sorted(firsts.items()):
            created = self._creation_of(first)
            if created and self._created.setdefault(first, created) != created:
                found.add(topic)
        return {tp for tp in among if tp.topic in found}

    def _creation_of(self, topic_partition: TopicPartition) -> str:
        assert self._admin is not None
        try:
            return self._admin.created(topic_partition)
        except BrokerError as exc:
            # Deleted this moment, or the interface is away: the next round tells.
            _log.debug("no creation time of %s: %s", topic_partition, exc)
            return ""

    def _clean(self) -> set[TopicPartition]:
        """Delete what reconnects of ours created, for as long as one may be under way.

        Returns:
            Topic partitions that belong to others, who created them again.
        """
        stay: set[TopicPartition] = set()
        for topic_partition in sorted(self._leftovers):
            self._leftovers[topic_partition] -= 1
            if self._stays(topic_partition):
                self._leftovers[topic_partition] = 0
                stay.add(topic_partition)
                _log.warning("%s exists again and belongs to others: it stays", topic_partition)
            else:
                self._owner.forget(topic_partition)
            if self._leftovers[topic_partition] <= 0:
                del self._leftovers[topic_partition]
        return stay

    def _stays(self, topic_partition: TopicPartition) -> bool:
        """Whether somebody else has a deleted topic partition again; else deletes what is left."""
        if topic_partition.partition >= 0 and topic_partition in self._partitions(
            topic_partition.topic
        ):
            return True
        if self._admin is None:
            return False
        is_gone = self._admin.remove_leftover(topic_partition, self._subscription)
        # A consumer of the subscription may be one of ours that came back late and is to be closed.
        return is_gone is False or (is_gone is None and self._leftovers[topic_partition] <= 0)

    def _add(self, existing: Iterable[TopicPartition]) -> None:
        new = sorted(tp for tp in existing if tp not in self._known)
        if not new:
            return
        self._owner.grow(new)
        self._known.update(new)
        self.discovered += len(new)
        self._recreated(new)
        _log.info("found %s", ", ".join(tp.name for tp in new))
