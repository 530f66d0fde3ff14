"""Plans a bounded read of a source's topics; its subscription is not used."""

from __future__ import annotations

from contextlib import closing
from datetime import timedelta

from keyshard.broker.connect import connect, connect_admin
from keyshard.config.source import SourceConfig
from keyshard.coordinator.topics import Catalog, look
from keyshard.core.option_checks import check_seconds
from keyshard.core.position.bounds import parse_bounds
from keyshard.core.position.split import Split
from keyshard.errors import ConfigError
from keyshard.reading.splits import stretches

DISORDER_S_MAX = timedelta(days=3_650).total_seconds()
"""Largest disorder that is not taken for a mistake, seconds."""


def plan_read(
    source: SourceConfig,
    start: object = "earliest",
    end: object = "latest",
    *,
    disorder_max_s: float | None = None,
    published: tuple[int | None, int | None] = (None, None),
) -> tuple[Split, ...]:
    """What lies between two bounds now, one split for each topic partition.

    Args:
        source: Which topics of which cluster; its ``fail_on_data_loss`` and
            ``operation_timeout_ms`` hold, its subscription does not matter.
        start: First message; see :mod:`keyshard.core.position.bounds`.
        end: Up to which message, exclusive.
        disorder_max_s: How far publish times go back at most, seconds; see
            :func:`keyshard.reading.splits.stretches`.
        published: Publish times that are wanted of what lies between; see there.

    Raises:
        ConfigError: A bound or option is wrong, or the source has no ``admin_url``.
        TopicNotFoundError: A topic does not exist.
        DataLossTrimmedError, PositionAheadError, TopicRecreatedError: What a position names is not
            there; see :func:`keyshard.reading.splits.stretches`.
        BrokerError: The broker or the admin interface cannot be reached, or refuses.
    """
    if disorder_max_s is not None:
        check_seconds("disorder_max_s", disorder_max_s, DISORDER_S_MAX)
    if source.admin_url is None:
        raise ConfigError(
            "A bounded read needs the admin REST interface, which lists what is stored. Set "
            "admin_url."
        )
    timeout_s = source.operation_timeout_ms / 1000
    connection = source.how_to_connect()
    with closing(connect(connection)) as broker, closing(connect_admin(connection)) as admin:
        found = look(Catalog(broker, admin, source), None, timeout_s).consumed
        return stretches(
            admin,
            parse_bounds("start", start, found),
            parse_bounds("end", end, found),
            timeout_s,
            disorder_ms=None if disorder_max_s is None else round(disorder_max_s * 1000),
            published=published,
            fail_on_data_loss=source.fail_on_data_loss,
        )
