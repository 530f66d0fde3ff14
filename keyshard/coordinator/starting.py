"""Begins the subscriptions of a source that starts at positions, or at a publish time.

The broker makes each where it is to begin, before anybody consumes. So what lies before belongs to
nobody: it is not delivered, not acknowledged, and no backlog. And a source that dies before its
first checkpoint finds subscriptions that stand where they should. The broker knows whole entries
only: of one that a source begins inside, a property of the subscription tells which messages are
its own (docs/adr/0029).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from keyshard.broker.port import BEGINS, Admin
from keyshard.broker.retry import retry_until
from keyshard.config.source import SourceConfig
from keyshard.coordinator.topics import warn_of_existing
from keyshard.core.message import MessageId
from keyshard.core.position.bounds import (
    Bound,
    Edge,
    fixed,
    parse_bound,
    parse_bounds,
    parse_start,
)
from keyshard.core.position.entry import TopicPartition
from keyshard.core.position.ledger import Ledger
from keyshard.core.position.split import stretch
from keyshard.errors import AdminError
from keyshard.reading.splits import check_stored, gone
from keyshard.threads import Pool

THREADS_MAX = 8
"""Topic partitions asked about at the same time."""
NAME = "starting_position"


def begin_subscriptions(
    admin: Admin | None, config: SourceConfig, found: Iterable[TopicPartition]
) -> None:
    """Create those that do not exist, if the source is to begin at positions or a time.

    None is created where one of the positions is wrong. One that exists is left as it is.

    Raises:
        ConfigError: A topic partition has no position, or one is of none that is consumed.
        DataLossTrimmedError, PositionAheadError, TopicRecreatedError: What a position names is not
            there; see :func:`keyshard.reading.splits.check_stored`.
        BrokerError: The admin interface does not answer, or refuses.
    """
    start = parse_start(NAME, config.starting_position)
    found = tuple(found)
    if isinstance(start, Edge) or not found:
        return
    assert admin is not None, "positions need admin_url"
    # A time is one for all.
    bounds: dict[TopicPartition, Bound] = (
        dict.fromkeys(found, start) if isinstance(start, int) else parse_bounds(NAME, start, found)
    )
    warn_of_existing(admin, config.subscription, found, config.starting_position)
    begin = _Begin(admin, config)
    with Pool(THREADS_MAX, "keyshard-begin") as pool:
        positions = list(pool.map(begin.where, found, map(bounds.__getitem__, found)))
        list(pool.map(begin.create, found, positions))


class _Begin:
    """Two steps for each topic partition; the second changes something."""

    def __init__(self, admin: Admin, config: SourceConfig) -> None:
        self._admin = admin
        self._subscription = config.subscription
        self._timeout_s = config.operation_timeout_ms / 1000
        self._fail_on_data_loss = config.fail_on_data_loss

    def where(self, where: TopicPartition, bound: Bound) -> MessageId | None:
        """The first message that belongs to the source; ``None``: nothing is to be created."""
        if retry_until(
            lambda: self._admin.subscription(where, self._subscription), self._timeout_s
        ):
            return None
        if isinstance(bound, int):
            time_ms = bound
            at = retry_until(lambda: self._admin.position_at(where, time_ms), self._timeout_s)
            if at is None:
                raise gone(where)
            return MessageId(*at, 0)
        ledgers = retry_until(lambda: self._admin.ledgers(where), self._timeout_s)
        if ledgers is None:
            raise gone(where)
        check_stored(
            self._admin, NAME, where, bound, ledgers, timeout_s=self._timeout_s,
            fail_on_data_loss=self._fail_on_data_loss,
        )  # fmt: skip
        stays = fixed(bound, ledgers)
        # Every consumer that makes a subscription begins it at the earliest.
        return stays if isinstance(stays, MessageId) else None

    def create(self, where: TopicPartition, position: MessageId | None) -> None:
        """Create the subscription there, and look whether it stands there.

        The broker makes it and moves it in two steps.
        """
        if position is None:
            return
        made = retry_until(
            lambda: self._admin.begin(where, self._subscription, position), self._timeout_s
        )
        cursor = _cursor(self._admin, where, self._subscription, self._timeout_s)
        if cursor is None:
            return
        behind, ledgers = cursor
        passed = stretch(where, ledgers, position._replace(batch_index=0), behind)
        if passed.entries:
            raise AdminError(
                f"Subscription {self._subscription!r} of {where} was to begin at {position.ledger}:"
                f"{position.entry}, and stands at {behind}, {passed.entries} entries behind it"
                f"{'' if made else '; somebody else made it meanwhile'}. Nothing was consumed: "
                "delete the subscription, and start again."
            )


def _cursor(
    admin: Admin, where: TopicPartition, subscription: str, timeout_s: float
) -> tuple[MessageId, Sequence[Ledger]] | None:
    """The first message that a cursor has not passed, and what is stored; ``None``: there is none.

    Raises:
        BrokerError: The admin interface does not answer, or refuses.
    """
    state = retry_until(lambda: admin.broker_state(where, subscription), timeout_s)
    ledgers = retry_until(lambda: admin.ledgers(where), timeout_s)
    marked = None if state is None else state.mark_delete
    if marked is None or ledgers is None:
        return None
    return MessageId(marked.ledger, marked.entry + 1, 0), ledgers


def begun_inside(
    admin: Admin | None, config: SourceConfig, found: Iterable[TopicPartition], *, starts: bool
) -> dict[TopicPartition, MessageId]:
    """The first message of each subscription that begins inside a producer batch.

    That is asked at every start: options may be others by now, and a broker that forgets
    acknowledgements delivers that entry again. One whose cursor was set back to an earlier entry
    begins there no more.

    Args:
        admin: Tells of subscriptions; ``None``: none begins there.
        config: Names the subscription.
        found: Topic partitions that are asked about.
        starts: Whether the source starts: then a cursor that was set back takes the property away,
            which would count again once the cursor is there.

    Raises:
        BrokerError: The admin interface does not answer, or refuses.
    """
    if admin is None:
        return {}
    timeout_s = config.operation_timeout_ms / 1000
    asked = tuple(found)

    def ask(where: TopicPartition) -> MessageId | None:
        told = retry_until(lambda: admin.subscription(where, config.subscription), timeout_s)
        text = (told or {}).get("subscriptionProperties", {}).get(BEGINS)
        if text is None:
            return None
        position = parse_bound(f"Property {BEGINS} of {config.subscription!r}", text)
        cursor = _cursor(admin, where, config.subscription, timeout_s)
        if cursor is None or not isinstance(position, MessageId):
            return None
        behind, ledgers = cursor
        before = stretch(where, ledgers, behind, position._replace(batch_index=0))
        if not before.entries:
            return position
        if starts:
            retry_until(lambda: admin.begins_whole(where, config.subscription), timeout_s)
        return None

    with Pool(THREADS_MAX, "keyshard-begin") as pool:
        positions = list(pool.map(ask, asked))
    return {
        where: position
        for where, position in zip(asked, positions, strict=True)
        if position is not None
    }
