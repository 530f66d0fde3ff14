"""Random programs on a real broker: a read from bookies has the rows of a read by the broker.

So has a read with an index of closed ledgers, by the broker and from bookies. Earlier reads of the
same program made it, perhaps before a transaction ended or ledgers were deleted.

A failure prints its seed. ``python -m tests.integration.test_segments_random --seeds 100`` draws
more of them, and ``--seeds 1 --seed-start N`` repeats one. The broker of a seed is one of
:data:`SETTINGS`, by its number.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest

from keyshard import KeyShardSource
from keyshard.columns.record_batches import COLUMNS
from keyshard.config.segments import Segments
from keyshard.core.position import zones
from keyshard.core.position.split import Split, cut
from keyshard.core.position.zones import Wanted
from keyshard.errors import KeyShardError
from keyshard.reading import zone_builder
from keyshard.reading.read_report import ReadReport
from keyshard.reading.split_planner import plan_read
from keyshard.reading.split_reader import read_splits
from keyshard.testing.devbroker import DevBroker
from tests.integration.segment_programs import (
    T_BACK_MS,
    Clients,
    Filled,
    Program,
    fillers,
    offloading,
    program,
)
from tests.support.deadlines import deadline
from tests.support.offloaders import STORES, Stores
from tests.support.tested_pulsar import PULSAR

pytestmark = [
    pytest.mark.broker,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("patient_bookies"),
]

SEEDS = 6
"""Programs for each broker."""
READS = 3
"""Reads with drawn options after each program, besides the one of everything."""
KEPT = {
    "transactionCoordinatorEnabled": "true",
    "defaultRetentionTimeInMinutes": "-1",
    "defaultRetentionSizeInMB": "-1",
}
STAMPS = {
    "brokerEntryMetadataInterceptors": ",".join(
        f"org.apache.pulsar.common.intercept.Append{name}MetadataInterceptor"
        for name in ("BrokerTimestamp", "Index")
    ),
}
SETTINGS: Sequence[Mapping[str, str]] = (
    {},
    {
        **STAMPS,
        "managedLedgerMaxEntriesPerLedger": "9",
        "managedLedgerMinLedgerRolloverTimeMinutes": "0",
        "managedLedgerDigestType": "CRC32",
    },
    {**STAMPS, "exposingBrokerEntryMetadataToClientEnabled": "true"},
)
"""Brokers that add nothing to entries, that add something and hide it, and that show it."""
OF_BROKER = "__brokerPublishTime"
ALL = tuple(name for name in COLUMNS.names if name != OF_BROKER)
"""Columns that bookies know."""
BY_BROKER = "broker"


@dataclass(frozen=True)
class Outcome:
    """The rows of a read, and the error that ended it."""

    rows: pa.Table
    batches: tuple[int, ...]
    error: str


@dataclass(frozen=True)
class Read:
    """Options of a read."""

    columns: Sequence[str] = ALL
    start: Any = "earliest"
    end: Any = "latest"
    published: tuple[int | None, int | None] = (None, None)
    disorder_s: float | None = None
    keys: frozenset[str] | None = None
    parts: int = 1
    fail_on_data_loss: bool = True


class Comparison:
    """Reads a topic in all ways, and compares.

    Args:
        source: Names the topic.
        ways: How it is read, beside by the broker.
        origins: Counts the entries by their origin.
        index: Folder of the index.
    """

    def __init__(
        self,
        source: KeyShardSource,
        ways: Sequence[Segments],
        origins: Counter[str],
        index: str,
    ) -> None:
        self.source, self.origins, self.index = source, origins, index
        self.ways = [
            one.source if one.offloads is None else f"{one.source}, offloads" for one in ways
        ]
        self.failed = False
        """Whether a split of the last read had an error."""
        self.segments: dict[str, Segments | None] = {
            BY_BROKER: None,
            **dict(zip(self.ways, ways, strict=True)),
        }

    def plan(self, read: Read, by: str) -> tuple[list[Split], str]:
        """Return the splits of a read, or its error."""
        try:
            planned = plan_read(
                self.source, read.start, read.end, disorder_max_s=read.disorder_s,
                published=read.published, segments=self.segments[by],
            )  # fmt: skip
        except KeyShardError as exc:
            return [], f"{type(exc).__name__}: {exc}"
        return cut(planned, read.parts), ""

    def check(self, read: Read) -> pa.Table:
        """Compare plans and rows; return the rows."""
        wanted, error = self.plan(read, BY_BROKER)
        found = {by: self.plan(read, by) for by in self.ways}
        for by, (splits, said) in found.items():
            assert said == error, f"{read}: plan for {by}: {said!r}, not {error!r}"
            assert unplaced(splits) == unplaced(wanted), f"{read}: plan for {by}"
        rows = self.check_splits(read, wanted, {by: splits for by, (splits, _) in found.items()})
        if not error and not self.failed:
            self.check_index(read, rows)
        return rows

    def make_index(self) -> None:
        """Read everything with the index, which adds what it lacks."""
        with suppress(KeyShardError):
            splits = plan_read(self.source, ledger_index=self.index)
            deque(
                read_splits(
                    self.source.how_to_connect(), splits, ["value"], ledger_index=self.index
                ),
                maxlen=0,
            )

    def check_index(self, read: Read, expected: pa.Table) -> None:
        """Compare reads with the index; none of the reads without it had an error."""
        for by in (BY_BROKER, self.ways[0]):
            planned = plan_read(
                self.source, read.start, read.end, disorder_max_s=read.disorder_s,
                published=read.published, segments=self.segments[by], ledger_index=self.index,
                wanted=Wanted(keys=read.keys),
            )  # fmt: skip
            reports: list[ReadReport] = []
            batches = read_splits(
                self.source.how_to_connect(), cut(planned, read.parts), read.columns,
                keys=read.keys, segments=self.segments[by], ledger_index=self.index,
                report=reports.append,
            )  # fmt: skip
            found = pa.Table.from_batches(list(batches), expected.schema)
            assert found.equals(expected), f"{read}: index, {by}: {difference(found, expected)}"
            self.origins["index: read"] += sum(
                one.by_bookies + one.by_offloads + one.by_broker for one in reports
            )
            self.origins["index: skipped"] += sum(one.skipped for one in reports)

    def check_splits(
        self, read: Read, wanted: Sequence[Split], found: Mapping[str, Sequence[Split]]
    ) -> pa.Table:
        """Compare the rows of each split; return all of them."""
        tables: list[pa.Table] = []
        self.failed = False
        for number, split in enumerate(wanted):
            expected = self._outcome(read, split, BY_BROKER)
            for by, splits in found.items():
                got = self._outcome(read, splits[number], by)
                where = f"{read}: {by}, split {number} {shown(split)}"
                assert got.error == expected.error, f"{where}: {got.error}, not {expected.error}"
                assert got.rows.equals(expected.rows), (
                    f"{where}: {difference(got.rows, expected.rows)}"
                )
                assert got.batches == expected.batches, f"{where}: other batches"
            tables.append(expected.rows)
            self.failed = self.failed or bool(expected.error)
        return pa.concat_tables(tables) if tables else schema_of(read).empty_table()

    def _outcome(self, read: Read, split: Split, by: str) -> Outcome:
        batches: list[pa.RecordBatch] = []
        reports: list[ReadReport] = []
        error = ""
        try:
            for batch in read_splits(
                self.source.how_to_connect(), [split], read.columns, keys=read.keys,
                fail_on_data_loss=read.fail_on_data_loss,
                segments=self.segments[by],
                report=reports.append,
            ):  # fmt: skip
                batches.append(batch)  # noqa: PERF402 - those before an error, too
        except KeyShardError as exc:
            error = f"{type(exc).__name__}: {exc}"
        for report in reports:
            self.origins[f"{by}: bookies"] += report.by_bookies
            self.origins[f"{by}: broker"] += report.by_broker
            self.origins[f"{by}: store"] += report.by_offloads
        rows = pa.Table.from_batches(batches, schema_of(read))
        return Outcome(rows, tuple(one.num_rows for one in batches), error)


def schema_of(read: Read) -> pa.Schema:
    return pa.schema([COLUMNS.field(name) for name in read.columns])


def unplaced(splits: Sequence[Split]) -> list[Split]:
    """Splits without the bookies of their entries."""
    return [
        replace(one, spans=tuple(replace(span, placement="") for span in one.spans))
        for one in splits
    ]


def shown(split: Split) -> str:
    spans = ", ".join(f"{span.ledger}:{span.first}-{span.end - 1}" for span in split.spans)
    return f"{split.topic_partition.partition} ({spans})"


def difference(found: pa.Table, wanted: pa.Table) -> str:
    """Name the first row that differs."""
    for number, (got, expected) in enumerate(
        zip(found.to_pylist(), wanted.to_pylist(), strict=False)
    ):
        if got != expected:
            names = [name for name in got if got[name] != expected[name]]
            return f"row {number} {names}: {got} instead of {expected}"[:2_000]
    return f"{found.num_rows} rows instead of {wanted.num_rows}"


def drawn(chance: random.Random, splits: Sequence[Split], rows: pa.Table) -> Read:
    """Draw the options of a read of a topic that has these splits and rows."""
    names = chance.sample(ALL, chance.randint(1, 6))
    if chance.random() < 0.25:
        names.append(OF_BROKER)
    read = Read(names, parts=chance.choice((1, 2, 3, 5)))
    if chance.random() < 0.3:
        known = sorted(set(rows.column("__key").drop_null().to_pylist()))
        chosen = chance.sample(known, min(len(known), 2))
        read = replace(read, keys=frozenset([*chosen, "absent"]))
    how = chance.choice(("all", "positions", "published", "times"))
    times = [one.as_py() for one in rows.column("__publishTime").cast(pa.int64()).drop_null()]
    if how == "positions":
        start, end = (positions(chance, splits) for _ in range(2))
        read = replace(read, start=start, end=end if chance.random() < 0.5 else "latest")
    elif how != "all" and times:
        first, end_ms = sorted(chance.choice(times) // 1_000 + chance.choice((0, 1)) for _ in "12")
        span = (chance.choice((None, first)), chance.choice((None, end_ms)))
        read = replace(read, disorder_s=chance.choice((None, T_BACK_MS / 1_000, 3_600.0)))
        if how == "published":
            return replace(read, published=span)
        return replace(read, start=span[0] or "earliest", end=span[1] or "latest")
    return read


def positions(chance: random.Random, splits: Sequence[Split]) -> Any:
    """Draw a position in each topic partition, perhaps inside a batch."""
    found: dict[str, str] = {}
    for split in splits:
        name = split.topic_partition.name
        if not split.spans or chance.random() < 0.2:
            found[name] = "earliest"
            continue
        span = chance.choice(split.spans)
        entry = chance.randint(span.first, span.end)
        found[name] = f"{span.ledger}:{entry}:{chance.choice((0, 0, 1, 5))}"
    return found


def run(seed: int, made: Program, filled: Filled, comparison: Comparison) -> None:
    """Run a program, and compare reads of its topic."""
    chance = random.Random(f"reads of {seed}")
    early: list[list[Split]] = []
    for step in made.steps:
        if step.kind == "plan":
            filled.settle()
            read = Read(parts=chance.choice((1, 3)))
            early.append(comparison.plan(read, comparison.ways[0])[0])
            comparison.make_index()
        else:
            filled.run(step)
    filled.settle()
    rows = comparison.check(Read())
    splits, _ = comparison.plan(Read(), BY_BROKER)
    for _ in range(READS):
        comparison.check(drawn(chance, splits, rows))
    for planned in early:
        for strict in (True, False):
            read = Read(fail_on_data_loss=strict)
            comparison.check_splits(read, planned, dict.fromkeys(comparison.ways, planned))


def checked(
    seed: int,
    broker: DevBroker,
    clients: Clients,
    origins: Counter[str],
    stores: Stores | None = None,
) -> None:
    """Run the program of a seed; with stores, its ledgers are offloaded.

    Raises:
        AssertionError: A read differs; the text has the program and how to repeat it.
    """
    made = program(seed)
    ways = [Segments(one, broker.bookies_map) for one in ("auto", "bookies")]
    name = __name__
    place: dict[str, Any] = {}
    if stores is not None:
        made, name = offloading(made, seed), f"{__name__.rpartition('.')[0]}.test_offloads_random"
        store = STORES[seed % len(STORES)]
        place = {"namespace": f"public/{store}", "offload": stores.offload}
        ways = [replace(one, offloads=stores.urls[store]) for one in (*ways, Segments())]
    zone_bytes = random.Random(f"zones of {seed}").choice((1, 1_000, 4_000_000))
    try:
        with (
            TemporaryDirectory() as index,
            patch.object(zone_builder, "BYTES", zone_bytes),
            patch.object(zones, "HOLE_BYTES", 0),
        ):
            filled = Filled(broker, clients[0], clients[1], made, **place)
            source = KeyShardSource(
                filled.name, service_url=broker.service_url, admin_url=broker.admin_url,
                operation_timeout_ms=round(deadline(10) * 1_000),
            )  # fmt: skip
            comparison = Comparison(source, ways, origins, index)
            run(seed, made, filled, comparison)
    except Exception as exc:
        again = f"python -m {name} --seeds 1 --seed-start {seed}"
        raise AssertionError(f"{exc}\n{made}\nTo repeat it: {again}") from exc


@pytest.fixture(scope="module", params=range(len(SETTINGS)), ids=("bare", "stamped", "shown"))
def numbered(request: pytest.FixtureRequest) -> Iterator[tuple[int, DevBroker]]:
    """A broker, and its number."""
    with DevBroker(PULSAR, settings={**KEPT, **SETTINGS[request.param]}) as started:
        yield request.param, started


def test_reads_from_bookies_have_the_rows_of_the_broker(numbered: tuple[int, DevBroker]) -> None:
    number, broker = numbered
    origins: Counter[str] = Counter()
    with fillers(broker) as clients:
        for seed in range(number, number + SEEDS * len(SETTINGS), len(SETTINGS)):
            checked(seed, broker, clients, origins)
    for by in ("auto", "bookies"):
        assert min(origins[f"{by}: bookies"], origins[f"{by}: broker"]) > 50, origins
    assert min(origins["index: read"], origins["index: skipped"]) > 50, origins


def holds(
    seed: int,
    broker: DevBroker,
    clients: Clients,
    origins: Counter[str],
    stores: Stores | None = None,
) -> bool:
    """Return whether the program of a seed passes; if not, print why."""
    began_s = time.monotonic()
    try:
        checked(seed, broker, clients, origins, stores)
    except AssertionError as exc:
        print(f"seed {seed}: {exc}", flush=True)
        return False
    print(f"seed {seed}: passed in {time.monotonic() - began_s:.1f} s", flush=True)
    return True


def main() -> int:
    """Run seeds, and print what fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many (default: 100)")
    parser.add_argument("--seed-start", type=int, default=0, help="the first one (default: 0)")
    given = parser.parse_args()
    origins: Counter[str] = Counter()
    failed = 0
    last = given.seed_start + given.seeds
    for number, settings in enumerate(SETTINGS):
        seeds = [one for one in range(given.seed_start, last) if one % len(SETTINGS) == number]
        if not seeds:
            continue
        with ExitStack() as opened:
            broker = opened.enter_context(DevBroker(PULSAR, settings={**KEPT, **settings}))
            clients = opened.enter_context(fillers(broker))
            for seed in seeds:
                failed += not holds(seed, broker, clients, origins)
    print(f"{given.seeds} programs, {failed} failed; entries {dict(origins)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
