"""Finds topics and topic partitions that appear and disappear while a source runs.

A round::

    1. look up   topics that are named or match now, and their topic partitions
    2. gone      known, and no longer in the metadata: close their consumers, drop received
                 entries, delete topics that our own reconnects created, forget delivered sets
    3. new       not known: own every range of them, from their beginning

If a topic is deleted, our own consumers reconnect within a second, and Pulsar creates the topic
again for them, unless a policy forbids it; from 4.1 on, it creates no partitions. A partitioned
topic is then still missing from the metadata. A topic without partitions looks unchanged, but its
storage is new and empty, which shows the deletion.

If another client created a topic again between two rounds, its new storage shows that too. The
topic is dropped and owned again, because consumers that found no topic do not come back. Consumers
that came back may have received from it before the round. So its delivered set stays, because those
entries may come once more.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress

from keyshard.base_error import one_line
from keyshard.broker.admin.port import Admin
from keyshard.broker.topics import Catalog
from keyshard.coordinator.partition_lifecycle import PartitionLifecycle
from keyshard.coordinator.progress import DiscoveryProgress
from keyshard.coordinator.subscription_ids import SubscriptionIds, properties_of
from keyshard.coordinator.topic_watches import TopicWatches
from keyshard.core.position.entry import TopicPartition
from keyshard.core.subscription_state import SubscriptionState
from keyshard.core.topic_segments import is_segment
from keyshard.errors import AdminError, BrokerError, KeyShardError
from keyshard.threads import begin

LEFTOVER_ROUNDS = 3
"""Fewest rounds in which a deleted topic partition is checked, because a consumer may come back."""
LEFTOVER_S = 5.0
"""Shortest time for these checks, seconds."""
SETTLE_S = 0.5
"""Time from the report of a topic to the round, seconds."""
AGAIN_S = 2.0
"""Time from that round to another one, seconds. A broker reports a topic partition before its
metadata counts it."""
ENDS_S = 0.2
"""Time between two looks at parents that segments wait for, seconds."""
REST_TIMES = 4.0
"""``SETTLE_S`` is replaced by this many times the duration of the last round, if that is longer."""

_log = logging.getLogger(__name__)


class _Errors:
    """Collects errors of the steps of a round."""

    def __init__(self) -> None:
        self._all: list[KeyShardError] = []

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Keep an error of the block for :meth:`raise_first`."""
        try:
            yield
        except KeyShardError as exc:
            self._all.append(exc)

    def raise_first(self) -> None:
        """Raise the first error, if there is one."""
        if self._all:
            raise self._all[0]


class Discovery:
    """Looks for new and deleted topic partitions in rounds, in one daemon thread.

    If a round fails, the next one tries again.

    Args:
        catalog: Looks topics up.
        admin: Admin REST interface; ``None`` without ``admin_url``.
        owned: The topic partitions of the source.
        subscription: Subscription of the source.
        ids: Sets the id of new subscriptions.
        interval_s: Time between two rounds, seconds.
    """

    def __init__(
        self, catalog: Catalog, admin: Admin | None, owned: PartitionLifecycle, subscription: str,
        ids: SubscriptionIds, *, interval_s: float,
    ) -> None:  # fmt: skip
        self._catalog = catalog
        self._admin = admin
        self._owned = owned
        self._subscription = subscription
        self._ids = ids
        self._interval_s = interval_s
        self._known: set[TopicPartition] = set()
        self._partitioned: set[str] = set()
        self._created: dict[TopicPartition, str] = {}
        self._leftovers: dict[TopicPartition, int] = {}
        self._leftover_rounds = max(LEFTOVER_ROUNDS, math.ceil(LEFTOVER_S / interval_s))
        self._unregistered: set[TopicPartition] = set()
        """New segments of topics with which the subscription is not registered."""
        self._stopping = threading.Event()
        self._reported = threading.Event()
        """Set when a topic was created or deleted, or the thread shall end."""
        self._watches = TopicWatches(catalog, self._reported.set)
        catalog.scalable.changed = self._reported.set
        self._thread: threading.Thread | None = None
        self.discovered = 0
        """Topic partitions found since the start."""
        self.gone = 0
        """Topic partitions that were deleted since the start."""
        self.backlog: int | None = None
        """Backlog of all topic partitions in the newest round, entries; ``None`` if unknown."""
        self._counted: int | None = None
        """The same in the round that runs."""
        self.error = ""
        """Error of the newest round, or ``""``."""

    def start(self, known: Iterable[TopicPartition], gone: Iterable[TopicPartition] = ()) -> None:
        """Start the thread.

        Args:
            known: Topic partitions that the source consumes.
            gone: Topic partitions that were deleted before the start.
        """
        self._known.update(known)
        left = itertools.filterfalse(is_segment, gone)
        self._leftovers.update(dict.fromkeys(left, self._leftover_rounds))
        if any(map(is_segment, self._known)):
            self._reported.set()  # Before now, nobody was told of a split.
        self._partitioned.update(
            tp.topic for tp in (*self._known, *self._leftovers) if tp.partition >= 0
        )
        self._recreated(self._known)
        self._thread = begin("keyshard-discovery", self._run, fail=self._owned.fail)

    def stop(self) -> None:
        """End the thread after its round; returns without waiting."""
        self._stopping.set()
        self._reported.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end, at most ``timeout_s`` seconds."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def status(self) -> DiscoveryProgress:
        """Return the counts since the start, as plain JSON values."""
        return {
            "partitionsDiscovered": self.discovered,
            "partitionsGone": self.gone,
            "segmentsWaiting": self._owned.segments_waiting,
            "discoveryError": self.error,
            "backlogEntries": self.backlog,
        }

    def round(self, *, early: bool = False) -> None:
        """Run one round. An error of one topic does not stop the check of the others.

        Args:
            early: Whether the round follows a report of the broker. An early round does not count
                as one of the rounds in which leftovers are checked.

        Raises:
            KeyShardError: The first error.
        """
        self._counted = None
        try:
            self._round(early=early)
        finally:
            self.backlog = self._counted

    def _round(self, *, early: bool) -> None:
        topics = self._catalog.topics()
        existing: dict[str, tuple[TopicPartition, ...]] = {}
        errors = _Errors()
        topic_of = self._catalog.scalable.topic_of
        for topic in dict.fromkeys([*topics, *map(topic_of, sorted(self._known))]):
            with errors.collected():
                existing[topic] = self._partitions(topic)
        gone = {tp for tp in self._known if tp not in existing.get(topic_of(tp), (tp,))}
        with errors.collected():
            self._drop(gone, again=False)
        with errors.collected():
            again = self._catalog.scalable.created_again & self._known
            self._drop(self._recreated(self._known) | again, again=True)
            self._catalog.scalable.created_again.clear()
        # Without parents that are gone, but before children that are new.
        self._owned.order(self._catalog.scalable.parents())
        leftovers = set(self._leftovers)
        with errors.collected():
            # ``existing`` is older, so it contains the leftovers that this deletes.
            leftovers -= self._clean(counts=not early)
        for topic in topics:
            with errors.collected():
                self._add(tp for tp in existing.get(topic, ()) if tp not in leftovers)
        with errors.collected():
            self._owned.look_at_ends(self._catalog.scalable.backlog)
        with errors.collected():
            # A regular round repeats it for all: another client may have deleted the registration.
            self._catalog.scalable.register(self._unregistered if early else self._known)
            self._unregistered.clear()
        self._owned.tidy()
        with errors.collected():
            self._look_at_subscriptions()
        with errors.collected():
            self._ids.set_in(self._known)
        self._owned.identify(self._ids.of(self._known))
        errors.raise_first()

    def _look_at_subscriptions(self) -> None:
        """Count the backlog, and find consumers that the broker no longer has.

        A broker may lose a consumer that subscribes while the topic is deleted.
        """
        if self._admin is None:
            return
        backlog = 0
        for topic_partition in sorted(self._known):
            # Before the broker is asked: an older answer may lack these consumers.
            standing = self._owned.standing(topic_partition)
            state = self._state_of(topic_partition)
            backlog += 0 if state is None else state.backlog
            # Without a state, the topic is gone, or it exists without the subscription.
            if standing and (state is not None or self._creation_of(topic_partition)):
                self._owned.compare(standing, state)
        self._counted = backlog

    def _state_of(self, topic_partition: TopicPartition) -> SubscriptionState | None:
        """Return the broker's state of the subscription; ``None`` if it does not exist.

        Raises:
            AdminError: The answer is not understood.
        """
        assert self._admin is not None
        stats = self._admin.subscription(topic_partition, self._subscription)
        self._ids.seen(
            topic_partition, None if stats is None else properties_of(topic_partition, stats)
        )
        try:
            return None if stats is None else SubscriptionState.from_stats(stats)
        except ValueError as exc:
            raise AdminError(
                f"The cursor of the subscription in {topic_partition} cannot be understood: "
                f"{one_line(exc)}.",
                "Check admin_url.",
            ) from exc

    def _run(self) -> None:
        rest_s, again = SETTLE_S, False
        try:
            if self._watches.open():
                # Something may have changed since the start looked for topics.
                self._reported.set()
            while not self._stopping.is_set():
                wait_s = min(AGAIN_S, self._interval_s) if again else self._interval_s
                reported = self._rest(wait_s)
                if reported:
                    self._stopping.wait(min(rest_s, self._interval_s))
                    self._reported.clear()
                if self._stopping.is_set():
                    return
                # A watch reports only later changes; the round that follows finds the earlier ones.
                self._watches.open()
                began_s = time.monotonic()
                self._attempt(early=reported or again)
                rest_s = max(SETTLE_S, REST_TIMES * (time.monotonic() - began_s))
                again = reported
        finally:
            self._watches.close()

    def _rest(self, wait_s: float) -> bool:
        """Wait for a report or the next round; return whether there was a report.

        While segments wait for their parents, look at the parents.
        """
        end_s = time.monotonic() + wait_s
        while self._owned.segments_waiting and (left_s := end_s - time.monotonic()) > 0:
            if self._reported.wait(min(ENDS_S, left_s)):
                return True
            with suppress(KeyShardError):  # a round reports it
                self._owned.look_at_ends(self._catalog.scalable.backlog)
        return self._reported.wait(max(0.0, end_s - time.monotonic()))

    def _attempt(self, *, early: bool) -> None:
        """Run one round, and report its error."""
        try:
            self.round(early=early)
        except KeyShardError as exc:
            if not self._stopping.is_set():
                self._report(exc)
        else:
            self.error = ""

    def _report(self, error: KeyShardError) -> None:
        if error.summary != self.error:
            _log.warning("could not look for topics, trying again: %s", error.summary)
        self.error = error.summary

    def _partitions(self, topic: str) -> tuple[TopicPartition, ...]:
        found = self._catalog.partitions(topic, was_partitioned=topic in self._partitioned)
        if any(tp.partition >= 0 for tp in found):
            self._partitioned.add(topic)
        return found

    def _drop(self, gone: set[TopicPartition], *, again: bool) -> None:
        if not gone:
            return
        self._owned.shrink(gone, again=again)
        self._known -= gone
        self.gone += len(gone)
        # A broker does not create a segment for a consumer that reconnects.
        left = itertools.filterfalse(is_segment, gone)
        self._leftovers.update(dict.fromkeys(left, self._leftover_rounds))
        for topic_partition in sorted(gone):
            if is_segment(topic_partition) and not again:
                self._owned.forget(topic_partition)
            self._created.pop(topic_partition, None)
            self._ids.forget(topic_partition)
            _log.warning(
                "stopped consuming %s: it was deleted%s",
                topic_partition, " and created again" if again else "",
            )  # fmt: skip

    def _recreated(self, among: Collection[TopicPartition]) -> set[TopicPartition]:
        """Return topic partitions of topics whose storage was created again."""
        if self._admin is None:
            return set()
        found: set[str] = set()
        # The graph of a scalable topic tells whether it was created again.
        others = itertools.filterfalse(is_segment, among)
        firsts = {tp.topic: tp for tp in sorted(others, reverse=True)}
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
            # Deleted just now, or the interface does not answer: the next round shows which.
            _log.debug("the creation time of %s is unknown: %s", topic_partition, exc.summary)
            return ""

    def _clean(self, *, counts: bool) -> set[TopicPartition]:
        """Delete topics that our own reconnects created, for as long as one may be running.

        Returns:
            Topic partitions that other clients created again.
        """
        stay: set[TopicPartition] = set()
        for topic_partition in sorted(self._leftovers):
            self._leftovers[topic_partition] -= counts
            if self._belongs_to_others(topic_partition):
                self._leftovers[topic_partition] = 0
                stay.add(topic_partition)
                _log.warning(
                    "%s exists again: another client uses it, or the broker does not delete it",
                    topic_partition,
                )
            else:
                self._owned.forget(topic_partition)
            if self._leftovers[topic_partition] <= 0:
                del self._leftovers[topic_partition]
        return stay

    def _belongs_to_others(self, topic_partition: TopicPartition) -> bool:
        """Return whether another client created a topic partition again.

        If not, the leftover of our own reconnects is deleted.
        """
        if topic_partition.partition >= 0 and topic_partition in self._partitions(
            topic_partition.topic
        ):
            return True
        if self._admin is None:
            return False
        is_gone = self._admin.remove_leftover(topic_partition, self._subscription)
        # A consumer of the subscription may be our own: it came back late and will be closed.
        return is_gone is False or (is_gone is None and self._leftovers[topic_partition] <= 0)

    def _add(self, existing: Iterable[TopicPartition]) -> None:
        new = sorted(tp for tp in existing if tp not in self._known)
        if not new:
            return
        # Until it is set, checkpoints name no id of a new subscription.
        self._owned.identify(self._ids.of((*self._known, *new)))
        self._owned.grow(new)
        self._known.update(new)
        self._unregistered.update(filter(is_segment, new))
        self.discovered += len(new)
        self._recreated(new)
        _log.info("found %s", ", ".join(tp.name for tp in new))
