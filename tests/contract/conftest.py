"""Every contract case runs on the in-memory broker, on it behind workers, and on a real one.

The real one is reached by pulsar-client, and by the protocol itself. Cases of Readers also run with
those that take closed ledgers from bookies.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from keyshard.testing.devbroker import DevBroker, DevCluster
from tests.contract.contract_harness import (
    BreakableHarness,
    FailingHarness,
    Harness,
    ScalableHarness,
)
from tests.contract.hosted_harness import HostedHarness
from tests.contract.memory_harness import MemoryHarness, OldestMemoryHarness
from tests.contract.pulsar_harness import NAMES_MAX, BreakablePulsarHarness, PulsarHarness
from tests.support.lone_bookie import cluster_of, revived
from tests.support.tested_pulsar import PULSAR

REAL = [pytest.param(transport, marks=pytest.mark.broker) for transport in ("pulsar", "wire")]
OLDEST = "memory-4.0.8"
IN_MEMORY = {"memory": MemoryHarness, OLDEST: OldestMemoryHarness, "hosted": HostedHarness}
ALL = ["memory", "hosted", *REAL]
PUBLISHING = ["memory", OLDEST, pytest.param("wire", marks=pytest.mark.broker)]
"""Those whose storage may stop: pulsar-client cannot publish entries."""
WITH_SEGMENTS = ["memory", pytest.param("wire", marks=pytest.mark.broker)]
"""Those that have scalable topics: pulsar-client and workers do not consume them."""
DIFFER = {
    "test_delayed",
    "test_entry_producer",
    "test_look_ahead",
    "test_producer_names",
    "test_stored_positions",
    "test_subscription_stats",
    "test_topics",
    "test_unacked_limits",
}
"""Modules of cases in which releases differ: the broker in memory also runs them as the oldest."""
EXCUSED = {
    "test_stored": "it asks the admin interface",
    "test_cursor_state": "it asks the admin interface",
    "test_an_uncovered_range_stops_its_partition_until_it_is_covered": "the broker's own doing",
    "test_acknowledging_waiting_entries_ends_a_stall_at_the_mark_delete": "as well",
    "test_a_wiped_cluster_hands_out_its_ledger_ids_again": "the broker's own doing",
}
"""Modules and cases that say nothing of ``wire``, and why: the suite is long."""
READ_FROM_BOOKIES = {
    "test_a_reader_gives_whole_entries_in_order_from_its_start": "",
    "test_a_reader_ignores_acknowledgements": "",
    "test_a_reader_acknowledges_nothing": "",
    "test_a_start_that_is_not_stored_gives_the_next_entry": "",
    "test_a_start_behind_everything_is_at_the_end_and_gets_later_entries": "",
    "test_without_values_all_else_is_the_same": "",
    "test_entries_before_a_chunked_message_can_be_read": "",
    "test_a_closed_reader_refuses_work_and_closes_again": "its topic is empty",
    "test_a_reader_misses_nothing_if_a_time_to_live_moves_its_cursor": "",
    "test_metadata_columns_are_the_same_from_consumer_and_reader": "the broker has one",
    "test_content_without_metadata_columns_is_unchanged": "",
    "test_null_and_empty_are_distinct": "",
    "test_a_reader_reports_the_slot_of_the_text_or_of_known_bytes": "",
    "test_a_delayed_message_is_an_entry_of_its_own": "",
    "test_a_reader_gets_delayed_messages_at_once_with_their_time": "",
    "test_publish_times_are_those_of_the_producer": "",
    "test_an_aborted_transaction_leaves_entries_that_are_never_delivered": "it comes first",
    "test_behind_the_last_message_nothing_is_left_to_read": "as well",
    "test_the_error_of_a_chunked_message_names_its_first_or_last_entry": "as well",
    "test_a_partly_acknowledged_batch_is_delivered_without_acknowledged_messages": "",
    "test_an_unreadable_entry_is_named_once_and_later_entries_come": "",
    "test_an_encrypted_entry_is_named_once_and_later_entries_come": "",
}
"""Cases of Readers that also hold for those of bookies, and why the broker returns all entries.

The other cases that read say nothing of closed ledgers: they are about producers, the admin
interface, lost connections of the broker, or a topic partition without entries."""
_HELD_UP = "before 4.0 a range that joins is held up by those that joined before"
_NO_LIMIT = "before 4.0 a replay queue has no such limit"
_COUNTED = "before 4.0 a consumer at its limit waits on when it acknowledged, and may pass it"
OLDER_BROKERS = {
    "test_unacknowledged_entries_go_to_the_next_owner_in_order_per_key": _HELD_UP,
    "test_markers_of_an_aborted_transaction_wait_for_the_owner_of_their_slot": _HELD_UP,
    "test_a_range_that_does_not_receive_stops_its_partition_until_it_does": _NO_LIMIT,
    "test_acknowledging_waiting_entries_ends_a_stall_at_the_mark_delete": _NO_LIMIT,
    "test_version_and_limits_are_reported": _NO_LIMIT,
    "test_consumers_bring_a_deleted_topic_back_and_the_rest_can_be_removed": _HELD_UP,
    "test_keyless_messages_all_arrive_and_spread_over_the_ranges": "before 4.0 they have one slot",
    "test_a_lone_consumer_at_its_limit_gets_more_only_once_half_is_acknowledged": _COUNTED,
    "test_beside_another_a_consumer_at_its_limit_gets_as_many_as_it_acknowledges": _COUNTED,
    "test_the_limit_of_a_consumer_counts_messages_and_an_entry_may_pass_it": _COUNTED,
}
"""Cases that a broker before 4.0 does not keep, and why."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each case on all brokers."""
    module = metafunc.module.__name__.rpartition(".")[2]
    brokers = [OLDEST, *ALL] if module in DIFFER else list(ALL)
    if metafunc.function.__name__ in READ_FROM_BOOKIES:
        brokers.append(pytest.param("bookies", marks=pytest.mark.broker))
    for name in {"harness", "breakable"} & set(metafunc.fixturenames):
        metafunc.parametrize(name, brokers, indirect=True)
    if "scalable" in metafunc.fixturenames:
        metafunc.parametrize("scalable", WITH_SEGMENTS, indirect=True)
    if "failing" in metafunc.fixturenames:
        metafunc.parametrize("failing", PUBLISHING, indirect=True)


@pytest.fixture
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    """A cluster with its topics; the real broker is started once for the session."""
    _excuse(request)
    made: Harness
    if request.param in IN_MEMORY:
        made = IN_MEMORY[request.param]()
    elif request.param == "bookies":
        from tests.contract.bookie_harness import BookieHarness  # noqa: PLC0415 - only who needs it

        made = BookieHarness(request.getfixturevalue("dev_broker"))
    else:
        from tests.contract.wire_harness import WireHarness  # noqa: PLC0415 - only who needs it

        dev_broker = request.getfixturevalue("dev_broker")
        kind = WireHarness if request.param == "wire" else PulsarHarness
        made = kind(dev_broker.service_url, dev_broker.admin_url)
    yield made
    made.close()
    _check_bookies(request, made)


@pytest.fixture
def breakable(request: pytest.FixtureRequest) -> Iterator[BreakableHarness]:
    """A cluster that may be broken; the real broker is another one than that of ``harness``."""
    _excuse(request)
    made: BreakableHarness
    if request.param in IN_MEMORY:
        made = IN_MEMORY[request.param]()
    elif request.param == "bookies":
        from tests.contract.bookie_harness import BreakableBookieHarness  # noqa: PLC0415 - as well

        made = BreakableBookieHarness(request.getfixturevalue("breakable_broker"))
    else:
        from tests.contract.wire_harness import BreakableWireHarness  # noqa: PLC0415 - only who needs it

        own = BreakableWireHarness if request.param == "wire" else BreakablePulsarHarness
        made = own(request.getfixturevalue("breakable_broker"))
    yield made
    made.close()
    _check_bookies(request, made)


def _check_bookies(request: pytest.FixtureRequest, made: Harness) -> None:
    """Check that a case which holds for bookies has got entries from them."""
    if request.param == "bookies":
        from tests.contract.bookie_harness import ReadsBookies  # noqa: PLC0415 - only who needs it

        assert isinstance(made, ReadsBookies)
        why = READ_FROM_BOOKIES[request.node.originalname]
        assert (made.by_bookies == 0) == bool(why), f"{made.by_bookies} entries from bookies"


def _excuse(request: pytest.FixtureRequest) -> None:
    names = request.module.__name__.rpartition(".")[2], request.node.originalname
    reasons = [EXCUSED[name] for name in names if name in EXCUSED]
    if request.param == "wire" and reasons:
        pytest.skip(reasons[0])
    older = OLDER_BROKERS.get(request.node.originalname)
    if (
        older is not None
        and request.param in {"pulsar", "wire", "bookies"}
        and int(PULSAR.split(".")[0]) < 4
    ):
        pytest.skip(older)


@pytest.fixture
def scalable(request: pytest.FixtureRequest) -> Iterator[ScalableHarness]:
    """A cluster that has scalable topics."""
    made: ScalableHarness
    if request.param in IN_MEMORY:
        made = IN_MEMORY[request.param]()
    else:
        from tests.contract.wire_harness import WireHarness  # noqa: PLC0415 - only who needs it

        if int(PULSAR.split(".")[0]) < 5:
            pytest.skip("brokers before 5.0 have no scalable topics")
        dev_broker = request.getfixturevalue("dev_broker")
        made = WireHarness(dev_broker.service_url, dev_broker.admin_url)
    yield made
    made.close()


@pytest.fixture
def failing(request: pytest.FixtureRequest) -> Iterator[FailingHarness]:
    """A cluster whose storage may stop; the real one has one bookie."""
    made: FailingHarness
    if request.param in IN_MEMORY:
        made = IN_MEMORY[request.param]()
    else:
        from tests.contract.wire_harness import FailingWireHarness  # noqa: PLC0415 - only who needs it

        made = FailingWireHarness(revived(request.getfixturevalue("lone_bookie")))
    yield made
    made.close()


@pytest.fixture(scope="session")
def lone_bookie() -> Iterator[DevCluster]:
    """A broker with one bookie."""
    from tests.contract.wire_harness import WRITE_S  # noqa: PLC0415 - only who needs it

    with cluster_of(1, WRITE_S) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def breakable_broker() -> Iterator[DevBroker]:
    """A real broker with batch index acknowledgements, transactions and broker publish times.

    All three are off by default.
    """
    settings = {
        "acknowledgmentAtBatchIndexLevelEnabled": "true",
        "transactionCoordinatorEnabled": "true",
        "brokerEntryMetadataInterceptors": (
            "org.apache.pulsar.common.intercept.AppendBrokerTimestampMetadataInterceptor"
        ),
        "exposingBrokerEntryMetadataToClientEnabled": "true",
        # The broker writes a cursor at its first acknowledgement, and then almost never. So the
        # written state does not depend on how fast the test runs.
        "managedLedgerDefaultMarkDeleteRateLimit": "0.001",
        "managedLedgerCursorPositionFlushSeconds": "3600",
        # How long a holder of a range may take to show that it lives.
        "connectionLivenessCheckTimeoutMillis": "1000",
        "brokerDeduplicationMaxNumberOfProducers": str(NAMES_MAX),
        "brokerDeduplicationEntriesInterval": "5",
        "backlogQuotaCheckIntervalInSeconds": "1",
    }
    with DevBroker(PULSAR, settings=settings) as broker:
        yield broker
