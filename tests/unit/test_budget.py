"""The window's budget follows the broker's limits, also when the broker is away for a moment."""

from __future__ import annotations

import pytest

from keyshard.coordinator.startup import UnacknowledgedLimits, unacknowledged_limits, window_budget
from keyshard.core.position.entry import TopicPartition
from keyshard.errors import AdminError, BrokerUnavailableError, ConfigError
from tests.helpers import P0, FakeAdmin, config
from tests.support.faulty_broker import ScriptedCall, answering, faulty


def admin_with(*errors: Exception) -> FakeAdmin:
    """An admin interface that answers with errors first."""
    admin = faulty(FakeAdmin(), unacknowledged_limits=answering((100, 300)))
    return faulty(admin, unacknowledged_limits=ScriptedCall(*errors))


def test_a_broker_that_is_away_for_a_moment_is_asked_again() -> None:
    admin = admin_with(BrokerUnavailableError("away"), BrokerUnavailableError("away"))
    assert unacknowledged_limits(admin, [P0], 10.0) == UnacknowledgedLimits(100, 300)


def test_a_broker_that_stays_away_is_an_error() -> None:
    admin = admin_with(*[BrokerUnavailableError("away")] * 1000)
    with pytest.raises(BrokerUnavailableError):
        unacknowledged_limits(admin, [P0], 0.0)


def test_default_limits_hold_if_the_broker_refuses_to_tell_its_limits() -> None:
    admin = admin_with(AdminError("forbidden"))
    assert unacknowledged_limits(admin, [P0], 10.0) == UnacknowledgedLimits()


def test_a_deleted_topic_leaves_the_limits_of_the_others_known() -> None:
    """A rescale may come before the source has noticed the deletion."""
    admin = admin_with(AdminError("Topic not found"))
    others = [TopicPartition("persistent://public/default/z")]
    assert unacknowledged_limits(admin, [P0, *others], 10.0) == UnacknowledgedLimits(100, 300)


def test_the_budget_stays_below_the_limits() -> None:
    source = config("t", parallelism=2, receiver_queue_size=10)
    budget = window_budget(source, admin_with(), [P0], 2)
    assert (budget.partition_rows_max, budget.range_rows_max) == (180, 90)


def test_a_thousand_ranges_have_a_window_beside_their_queues() -> None:
    budget = window_budget(config("t", parallelism=1_000), FakeAdmin(), [P0], 1_000)
    assert budget.partition_rows_max == 100_000
    assert budget.queue_max == 100


def test_more_ranges_than_the_broker_leaves_unacknowledged_are_refused() -> None:
    with pytest.raises(ConfigError, match="300 per subscription"):
        window_budget(config("t", parallelism=300), admin_with(), [P0], 300)
