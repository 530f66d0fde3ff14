"""The examples with Spark, on a real broker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from datetime import datetime, timedelta, timezone
from pathlib import Path

import psycopg
import pytest
from pulsar.schema import AvroSchema, JsonSchema, Long, Record, Schema
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from examples import join_topics, to_postgres, windowed_counts
from keyshard.testing.devbroker import DevBroker
from tests.helpers import present
from tests.spark.postgres_query import SELECT, STANDS_AT, TABLE
from tests.spark.postgres_server import postgres
from tests.spark.spark_process import SparkProcess, eventually
from tests.spark.spark_topic import SparkTopic, ended, failed, in_order
from tests.support.deadlines import deadline

pytestmark = [pytest.mark.spark, pytest.mark.broker]

WITHIN_S = deadline(180)
"""Longest time of a step, with all that runs beside it, seconds."""
ORDERS = """
create schema shop;
create table shop.orders (
    seq bigint generated always as identity, customer text, content text, published timestamptz
);
"""
BREAK_ONCE = """
create sequence faults;
create function break_once() returns trigger language plpgsql as $$
begin
    if nextval('faults') = 1 then
        perform pg_terminate_backend(pg_backend_pid());
    end if;
    return new;
end $$;
create trigger breaks before insert on shop.orders for each row execute function break_once();
"""
"""The connection that writes the next row breaks; a sequence is not rolled back."""


@pytest.fixture
def topic(dev_broker: DevBroker, topic_name: str, tmp_path: Path) -> SparkTopic:
    return SparkTopic(dev_broker, topic_name, tmp_path)


def test_each_row_is_in_postgres_once_and_in_order_after_a_kill_and_a_lost_connection(
    spark: SparkSession,
    topic: SparkTopic,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The kill is between the transaction and Spark's commit, the other inside a transaction."""
    topic.produce(900)
    options = topic.options(maxOffsetsPerTrigger="300", parallelism="2")
    with postgres() as url, psycopg.connect(url, autocommit=True) as connection:
        connection.execute(ORDERS)

        def at() -> int:
            found = connection.execute("select max(batch) from keyshard_batches").fetchone()
            return -1 if found is None or found[0] is None else int(found[0])

        def rows() -> list[tuple[str, str]]:
            return connection.execute(
                "select customer, content from shop.orders order by seq"
            ).fetchall()

        connection.execute(to_postgres.WRITTEN)
        monkeypatch.setenv("KEYSHARD_TEST_POSTGRES", url)
        run = SparkProcess(options, tmp_path, module="tests.spark.postgres_query")
        try:
            eventually(
                lambda: at() == STANDS_AT or not run.alive(), WITHIN_S, "the batch is written"
            )
            run.must_run()
            run.kill(run.processes()[0])
        finally:
            run.stop()
        assert run.batches("commits") == list(range(STANDS_AT))
        written = rows()
        connection.execute(BREAK_ONCE)

        def go_on() -> StreamingQuery:
            return to_postgres.start(
                spark, options, SELECT, str(run.checkpoint),
                postgres=url, table=TABLE, available_now=True,
            )  # fmt: skip

        text = failed(go_on(), WITHIN_S)
        assert "psycopg" in text
        assert rows() == written
        ended(go_on(), WITHIN_S)
        assert sorted(content for _, content in rows()) == sorted(topic.sent)
        assert in_order(rows())
        near = "select max(abs(extract(epoch from now() - published))) from shop.orders"
        assert present(connection.execute(near).fetchone())[0] < 3600, "times keep their zone"
    assert capsys.readouterr().out.count(f"batch {STANDS_AT} was already written") == 1


WINDOW = timedelta(minutes=5)


def publish(topic: SparkTopic, messages: Iterable[tuple[str, datetime | None]]) -> None:
    """Messages of keys with event times, or without."""
    with closing(topic.client()) as client:
        producer = client.create_producer(topic.name)
        for key, at in messages:
            stamp = {} if at is None else {"event_timestamp": round(at.timestamp() * 1000)}
            producer.send_async(b"x", None, partition_key=key, **stamp)
        producer.flush()


def test_windows_count_all_rows_except_those_that_are_too_late(
    spark: SparkSession, topic: SparkTopic, tmp_path: Path
) -> None:
    """A bounded run reads rows in time. The next run reads late rows, a row without event time,
    and a row that is too late.
    """
    now = datetime.now(timezone.utc).timestamp()
    first = datetime.fromtimestamp(now - now % 300, timezone.utc) - timedelta(hours=1)
    # Within the delay, so that nothing is late however batches are cut.
    in_time = [(f"k{n % 7}", first + timedelta(seconds=599 - n)) for n in range(600)]
    late = [(f"k{n % 3}", first + timedelta(seconds=n)) for n in range(30)]
    sink, options = str(tmp_path / "sink"), topic.options(parallelism="2")

    def go_on(*, available_now: bool) -> StreamingQuery:
        return windowed_counts.start(
            spark, options, sink, str(topic.checkpoint),
            window="5 minutes", delay="10 minutes", available_now=available_now,
        )  # fmt: skip

    publish(topic, in_time)
    ended(go_on(available_now=True), WITHIN_S)
    query = go_on(available_now=False)
    try:
        publish(topic, late)
        eventually(lambda: rows_of(query) == len(late), WITHIN_S, "they are counted")
        publish(topic, [("now", None)])
        eventually(
            lambda: ", 1 counts open, 0 too late" in report(query), WITHIN_S, "the rest is written"
        )
        publish(topic, [("late", first)])
        eventually(
            lambda: ", 1 counts open, 1 too late" in report(query), WITHIN_S, "it is left out"
        )
    finally:
        query.stop()
    found = {
        (row["start"].astimezone(timezone.utc), row["key"]): row["count"]
        for row in spark.read.parquet(sink).collect()
    }
    assert found == Counter(
        (first + (at - first) // WINDOW * WINDOW, key) for key, at in in_time + late
    )


def report(query: StreamingQuery) -> str:
    """Return the report of the example about the batches so far."""
    assert query.isActive, query.exception()
    return "\n".join(map(windowed_counts.counts_of, query.recentProgress))


def rows_of(query: StreamingQuery) -> int:
    """Messages of the batches so far."""
    assert query.isActive, query.exception()
    return sum(progress["numInputRows"] for progress in query.recentProgress)


class Order(Record):
    id = Long()
    amount = Long()


class Payment(Record):
    order_id = Long()
    paid = Long()


def send(topic: SparkTopic, schema: Schema, sent: Iterable[tuple[Record, datetime]]) -> None:
    """Records with event times."""
    with closing(topic.client()) as client:
        producer = client.create_producer(topic.name, schema=schema)
        for number, (record, at) in enumerate(sent):
            stamp = round(at.timestamp() * 1000)
            producer.send_async(record, None, partition_key=f"{number}", event_timestamp=stamp)
        producer.flush()


def test_orders_meet_their_payments_once_over_a_restart_and_a_topic_that_grows(
    spark: SparkSession, topic: SparkTopic, dev_broker: DevBroker, topic_name: str, tmp_path: Path
) -> None:
    """Paid never, once and twice, before and after a restart, in time and an hour too late."""
    payments = SparkTopic(dev_broker, f"{topic_name}-payments", tmp_path, partitions=2)
    first = datetime.now(timezone.utc) - timedelta(hours=3)
    orders = {number: first + timedelta(seconds=number) for number in range(120)}
    paid = [(n, n * 10 + i) for n in range(120) for i in range(n % 3)]

    def payment(number: int, what: int, after: timedelta) -> tuple[Payment, datetime]:
        return Payment(order_id=number, paid=what), orders[number] + after

    in_time = [payment(*one, timedelta(minutes=one[1] % 60)) for one in paid]
    too_late = [payment(number, -number, timedelta(minutes=61)) for number in range(1, 9)]
    ordered = [(Order(id=number, amount=number * 100), at) for number, at in orders.items()]
    # What has no other half yet waits in the checkpoint.
    rounds = [(ordered[:80], in_time[60:]), (ordered[80:], in_time[:60] + too_late)]
    for new_orders, new_payments in rounds:
        send(topic, JsonSchema(Order), new_orders)
        send(payments, AvroSchema(Payment), new_payments)
        query = join_topics.start(
            spark, topic.options(parallelism="2"), payments.options(parallelism="2"),
            str(tmp_path / "sink"), str(topic.checkpoint), available_now=True,
        )  # fmt: skip
        ended(query, WITHIN_S)
        payments.grow(payments.partitions + 2)
    found = spark.read.parquet(str(tmp_path / "sink")).collect()
    assert Counter((row["id"], row["amount"], row["paid"]) for row in found) == Counter(
        (number, number * 100, what) for number, what in paid
    )
