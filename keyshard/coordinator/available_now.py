"""A bounded run: consumes exactly the messages that were published before the run began.

The targets of a run are the last entries of the topic partitions at its start. Positions inside a
range are not monotonic, and ranges lag. So a target is reached only when each entry up to it is
delivered, or is certain never to come. Missing entries lie in gaps of the delivered set. The run
checks, in this order, whether they are

    1. acknowledged at the broker      from the cursor, with admin_url
    2. empty                           a plain Reader finds no entry: markers, the ends of ledgers
    3. not due                         its delivery time has not come: the entry is left and
                                       counted. pulsar-client does not tell the time; then the
                                       broker's count of delayed messages decides, if nothing
                                       arrives for ``available_now_quiet_ms``
    4. still to come                   a Reader finds an entry. Without admin_url, if nothing
                                       arrives for ``available_now_quiet_ms``, the entry counts
                                       as acknowledged before the run; in a segment without
                                       backlog, at once

Entries after a target never enter the window: they would fill it, and nothing could be cut. If a
range receives one, the broker has read everything up to the target. Missing entries then wait for
their owner in the broker's replay queue. So a range that received ``ROWS_BEHIND_MAX`` such rows
rests, while its client queue fills. Later it subscribes again, and the lowest positions come first.
If the broker's limits on unacknowledged messages are low, it rests after fewer rows.

A run of a scalable topic takes the segments that exist at its start, parents before children.
Later segments belong to the next run. If a parent keeps messages that are not due, or that an open
transaction holds back, its children are left for a later run.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Sequence

from keyshard.broker.admin.port import Admin
from keyshard.broker.port import Broker
from keyshard.broker.retry import retry_until
from keyshard.config.source import SourceConfig
from keyshard.consumers.acknowledger import Acknowledger
from keyshard.consumers.intake import Admitted
from keyshard.consumers.receive_state import Rest
from keyshard.consumers.receiver import RangeConsumer, Receiver
from keyshard.consumers.shared_window import SharedWindow
from keyshard.consumers.subscribe import close_range_consumers
from keyshard.coordinator.partition_lifecycle import BoundedSegments
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.read_target import Target
from keyshard.core.subscription_state import CursorState
from keyshard.core.topic_identity import check_ledgers
from keyshard.errors import (
    AvailableNowTimeoutError,
    BrokerError,
    ReplayTimeoutError,
)
from keyshard.reading.gap_reader import grouped, search
from keyshard.threads import Pool

ROWS_BEHIND_MAX = 2_000
"""Rows after the target that a range drops before it rests."""
REST_S = (1.0, 60.0)
"""First and longest rest of a range, seconds; each rest doubles."""
GATHER_S = (0.1, 1.0)
"""Quiet time before a cut, and the longest wait for it, seconds."""
BATCH_FILL = 0.5
"""Fill of the window from which a cut does not wait: a batch takes half of it at most."""
PROBE_AFTER_S = 0.3
"""Quiet time before the broker is asked for missing entries, seconds."""
PROBE_EVERY_S = (0.5, 5.0)
"""Shortest and longest time between two such requests, seconds."""
ACKNOWLEDGE_WAIT_S = 0.2
"""Wait for acknowledgements before the cursors are read, seconds."""
LOG_EVERY_S = 10.0
"""Time between two log lines of a wait, seconds."""
SEGMENTS_S = 0.2
"""Time between two looks at the segments of scalable topics, seconds."""
THREADS_MAX = 8
"""Topic partitions that are asked for their last entry in parallel."""

_log = logging.getLogger(__name__)


def last_entries(
    range_consumers: Iterable[RangeConsumer], timeout_s: float
) -> dict[TopicPartition, EntryId | None]:
    """Return the last entry of each topic partition.

    Raises:
        BrokerError: The broker does not answer within ``timeout_s`` seconds, or refuses.
    """
    one_each = {
        range_consumer.owned_range.topic_partition: range_consumer.consumer
        for range_consumer in range_consumers
    }
    with Pool(THREADS_MAX, "keyshard-target") as pool:
        asked = {
            topic_partition: pool.submit(retry_until, consumer.last_entry, timeout_s)
            for topic_partition, consumer in one_each.items()
        }
        return {topic_partition: answer.result() for topic_partition, answer in asked.items()}


class AvailableNow:
    """The targets of a bounded run, and the wait for them.

    Args:
        last: Last entry of each topic partition of the run.
        range_consumers: All consumers of those topic partitions.
        config: The source.
        broker: Connection for Readers.
        admin: Admin REST interface; ``None`` without ``admin_url``.
        shared: The window.
        segments: Segments of the run, which wait for their parents.
    """

    def __init__(
        self,
        last: dict[TopicPartition, EntryId | None],
        range_consumers: Sequence[RangeConsumer],
        *,
        config: SourceConfig,
        broker: Broker,
        admin: Admin | None,
        shared: SharedWindow,
        segments: BoundedSegments,
    ) -> None:
        self._targets = {where: Target(entry_id) for where, entry_id in last.items()}
        self._config = config
        self._broker = broker
        self._admin = admin
        self._shared = shared
        self._lock = shared.lock
        self._window = shared.window
        self._range_consumers = range_consumers
        self._segments = segments
        self._looked_s = -math.inf
        self._unseen, self._unseen_s = "", -math.inf
        """Why it is unknown which segments wait, if it is, and when it was unknown last."""
        self._behind: dict[tuple[TopicPartition, int], tuple[int, float]] = {}
        limit = shared.window.budget.behind_rows_max
        self._behind_max = ROWS_BEHIND_MAX if limit is None else min(limit, ROWS_BEHIND_MAX)
        self._logged_s = -math.inf
        self.finished = False
        """Whether every target was reached and every entry acknowledged."""

    # -- Called by the receive threads ------------------------------------------------------------

    def admit(self, range_consumer: RangeConsumer, entries: Sequence[EntryBlock]) -> Admitted:
        """Return the entries that belong to the run; a range with later entries may rest."""
        where = range_consumer.owned_range.topic_partition
        target = self._targets.get(where, Target(None))
        taken = [block for block in entries if target.includes(block.id)]
        dropped = sum(block.rows for block in entries) - sum(block.rows for block in taken)
        rest: Rest | None = None
        if dropped:
            owned_range = where, range_consumer.owned_range.range_index
            rows, rest_s = self._behind.get(owned_range, (0, REST_S[0]))
            rows += dropped
            if target.reached:
                rest = Rest(math.inf)
            elif rows >= self._behind_max:
                rest = Rest(time.monotonic() + rest_s)
                rows, rest_s = 0, min(2 * rest_s, REST_S[1])
            self._behind[owned_range] = rows, rest_s
        return Admitted(taken, rest)

    # -- Called by the host -----------------------------------------------------------------------

    def wait_for_rows(self, rows_max: int | None) -> bool:
        """Wait until a batch should be cut; ``False`` if every target is reached.

        Args:
            rows_max: Most rows of the batch; default ``batch_rows_max``.

        Raises:
            AvailableNowTimeoutError: Neither came in time.
        """
        enough = rows_max or self._config.batch_rows_max or math.inf
        began = arrived_s = time.monotonic()
        arrived, probe_s, probe_every_s = -1, began, PROBE_EVERY_S[0]
        missing = "the broker was not asked yet"
        while not self.finished:
            with self._lock:
                self._lock.wait(GATHER_S[0] / 4)
                self._shared.check()
                counters = self._window.counters
                now_arrived = counters.rows_received + counters.duplicates_dropped
                rows, full = self._window.received_rows, self._window.pauses.fill() >= BATCH_FILL
            now = time.monotonic()
            if self._look_at_segments(now) or now_arrived != arrived:
                arrived, arrived_s, probe_every_s = now_arrived, now, PROBE_EVERY_S[0]
            if rows:
                quiet = now - arrived_s >= GATHER_S[0] or now - began >= GATHER_S[1]
                if quiet or full or rows >= enough:
                    return True
                continue
            self._check_deadline(began, now, missing)
            if now - arrived_s >= PROBE_AFTER_S and now >= probe_s:
                if away := self._away():
                    arrived_s, missing = now, away
                    continue
                missing = self._probe(now - arrived_s)
                if not missing:
                    return False
                probe_s = time.monotonic() + probe_every_s
                probe_every_s = min(2 * probe_every_s, PROBE_EVERY_S[1])
        return False

    def wait_for_room(self, since_s: float) -> None:
        """Wait for a moment, after a cut that took none of the received rows.

        Args:
            since_s: Monotonic time of the first such cut, seconds.

        Raises:
            AvailableNowTimeoutError: No cut took any for too long.
        """
        now = time.monotonic()
        with self._lock:
            rows = self._window.rows
            self._lock.wait(GATHER_S[0])
            self._shared.check()
        self._check_deadline(
            since_s, now,
            f"no batch takes any of {rows} rows in the window, because the checkpoint has no room "
            "for more gaps. Raise checkpoint_bytes_max (maxCheckpointBytes)",
        )  # fmt: skip

    def finish(self, acknowledger: Acknowledger, receivers: Sequence[Receiver]) -> None:
        """Hand over all acknowledgements and close the consumers. Idempotent.

        With ``admin_url`` it waits until the cursors show the acknowledgements. It repeats those
        that a broker lost in a crash.

        Raises:
            AvailableNowTimeoutError: The broker did not take the acknowledgements in time.
            TopicRecreatedError: The broker never created the delivered entries: its storage was
                wiped.
        """
        if self.finished:
            return
        began = time.monotonic()
        while not (acknowledger.flush(ACKNOWLEDGE_WAIT_S) and self._is_acknowledged(acknowledger)):
            with self._lock:
                self._shared.check()
            self._check_deadline(began, time.monotonic(), "acknowledgements are not confirmed yet")
        for receiver in receivers:
            receiver.stop()
        for receiver in receivers:
            receiver.join(self._config.operation_timeout_ms / 1000)
        close_range_consumers(self._range_consumers)
        self.finished = True

    # -- Segments of scalable topics --------------------------------------------------------------

    def _look_at_segments(self, now: float) -> bool:
        """Receive from segments whose parents have ended; leave out deleted segments.

        Returns:
            Whether some segment no longer waits.
        """
        if now - self._looked_s < SEGMENTS_S:
            return False
        self._looked_s = now
        waiting = self._segments.waiting
        try:
            self._segments.look()
            self._unseen = ""
        except BrokerError as exc:
            _log.debug("the segments are unknown: %s", exc.summary)
            self._unseen = f"the segments are unknown: {exc.problem}"
            self._unseen_s = now
        for where in self._segments.gone & self._targets.keys():
            _log.warning("stopped consuming %s: it was deleted", where)
            del self._targets[where]
            self._range_consumers = [
                one for one in self._range_consumers if one.owned_range.topic_partition != where
            ]
        return self._segments.waiting != waiting

    def _wait_for_parents(self, children: Sequence[TopicPartition], quiet_s: float) -> str:
        """Return what segments wait for; ``""`` if they are left for a later run."""
        if self._unseen:
            return self._unseen
        with self._lock:
            if self._window.batches:
                return "a planned batch is not committed"
        seen_s = min(quiet_s, time.monotonic() - self._unseen_s)
        if seen_s * 1000 < self._config.available_now_quiet_ms:
            return f"the parents of {children[0]} are not acknowledged"
        _log.warning(
            "%d segments, such as %s, are left for a later run: their parents keep messages that "
            "are not due, or that an open transaction holds back",
            len(children), children[0],
        )  # fmt: skip
        for where in children:
            self._targets[where].reached = True
        return ""

    # -- Missing entries and acknowledgements -----------------------------------------------------

    def _away(self) -> str:
        """Name the first consumer without a connection, and the reason; ``""`` if there is none."""
        for one in self._range_consumers:
            if not one.consumer.is_connected():
                why = one.problem().rstrip(".")
                name = f"a consumer of {one.owned_range.topic_partition} is not connected"
                return f"{name}: {why}" if why else name
        return ""

    def _probe(self, quiet_s: float) -> str:
        """Ask the broker for missing entries; return the first thing to wait for, or ``""``."""
        children: list[TopicPartition] = []
        for where, target in self._targets.items():
            if not target.reached and self._segments.waits(where):
                children.append(where)
            elif not target.reached:
                missing = self._probe_partition(where, target, quiet_s)
                if missing:
                    return missing
                target.reached = True
                _log.info("read %s up to %s", where, target.last)
        if children and (missing := self._wait_for_parents(children, quiet_s)):
            return missing
        with self._lock:
            return "a planned batch is not committed" if self._window.batches else ""

    def _probe_partition(self, where: TopicPartition, target: Target, quiet_s: float) -> str:
        with self._lock:
            state = self._window.known[where].state
        try:
            broker_state = self._broker_state(where)
        except BrokerError as exc:
            _log.warning("the cursor of %s is unknown: %s", where, exc.summary)
            return f"the cursor of {where} is unknown: {exc.problem}"
        for gaps in grouped(target.open_gaps(state.delivered, state.floor, broker_state)):
            try:
                found = search(self._broker, where, gaps, self._config.skipped)
            except (BrokerError, ReplayTimeoutError) as exc:
                _log.debug(
                    "gaps from %s of %s could not be read: %s", gaps[0].start, where, exc.summary
                )
                return f"{where} cannot be read: {exc.problem}"
            for gap in gaps[: found.passed]:
                target.nothing_in(gap)
            self._leave(where, found.not_due)
            if found.entry is not None:
                name = f"entry {found.entry.ledger}:{found.entry.entry} of {where}"
                waits = self._waits_for(where, name, quiet_s, sure=broker_state is not None)
                return name if waits else ""
            if found.passed < len(gaps):
                return f"{where} is read from {gaps[found.passed].start} on"
        return ""

    def _waits_for(self, where: TopicPartition, name: str, quiet_s: float, *, sure: bool) -> bool:
        """Return whether the run waits for a stored entry.

        Args:
            where: The topic partition.
            name: The entry.
            quiet_s: Time for which nothing has arrived, seconds.
            sure: Whether the entry is known not to be acknowledged.
        """
        try:
            backlog = self._segments.backlog(where)
        except BrokerError as exc:
            _log.debug("the backlog of %s is unknown: %s", where, exc.summary)
            return True
        if backlog == 0:
            return False
        with self._lock:
            # Acknowledged entries do not count in the backlog. So one that the source does not
            # hold is still to come.
            sure = sure or (backlog or 0) > len(self._window.known[where].held)
        if quiet_s * 1000 < self._config.available_now_quiet_ms:
            return True
        if not sure:
            _log.info("%s and the entries after it count as acknowledged before the run", name)
            return False
        # Only pulsar-client does not tell which entries are delayed.
        delayed = self._delayed(where) if self._config.how_to_connect().by_client else 0
        self._leave(where, delayed)
        return not delayed

    def _leave(self, where: TopicPartition, entries: int) -> None:
        """Count entries that are left, because they are not due."""
        if entries:
            _log.warning(
                "%d delayed entries of %s are not due, and are left for a later run", entries, where
            )
            with self._lock:
                self._window.counters.entries_not_due += entries

    def _delayed(self, where: TopicPartition) -> int:
        """Return the broker's count of delayed messages; 0 if it is unknown."""
        assert self._admin is not None
        try:
            stats = self._admin.subscription(where, self._config.subscription) or {}
        except BrokerError as exc:
            _log.warning("the delayed messages of %s are unknown: %s", where, exc.summary)
            return 0
        return int(stats.get("msgDelayed", 0))

    def _broker_state(self, where: TopicPartition) -> CursorState | None:
        """Return the entries that the cursor has acknowledged; ``None`` if unknown."""
        if self._admin is None:
            return None
        found = self._admin.broker_state(where, self._config.subscription)
        return found if found is not None and found.mark_delete is not None else None

    def _is_acknowledged(self, acknowledger: Acknowledger) -> bool:
        """Return whether the cursors contain every delivered entry; true without ``admin_url``.

        Entries that a cursor lacks are acknowledged again.
        """
        if self._admin is None:
            return True
        with self._lock:
            # The client groups acknowledgements, so only a wait helps here.
            self._lock.wait_for(lambda: False, ACKNOWLEDGE_WAIT_S)
        complete = True
        for where in self._targets:
            with self._lock:
                state = self._window.known[where].state
            try:
                broker_state = self._broker_state(where)
            except BrokerError as exc:
                _log.warning("the cursor of %s is unknown: %s", where, exc.summary)
                return False
            if broker_state is None:
                continue
            check_ledgers(where, state, broker_state)
            if lacking := broker_state.lacks(state.delivered):
                complete = False
                acknowledger.submit(where, list(lacking))
        return complete

    def _check_deadline(self, began: float, now: float, missing: str) -> None:
        if now - began > self._config.available_now_timeout_ms / 1000:
            raise AvailableNowTimeoutError(
                "The run is not complete, and planned no batch for "
                f"{self._config.available_now_timeout_ms} ms: {missing}. "
                "Committed rows are acknowledged.",
                "Check the broker, or raise availableNowTimeoutMillis. A restart continues after "
                "the committed rows.",
                missing=missing,
            )
        if now - max(began, self._logged_s) >= LOG_EVERY_S:
            self._logged_s = now
            reached = sum(target.reached for target in self._targets.values())
            _log.info(
                "available now: read %d of %d topic partitions; waiting for %.0f s, %s",
                reached, len(self._targets), now - began, missing,
            )  # fmt: skip
