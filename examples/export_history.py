"""Export the stored messages of a topic to Parquet files, in several processes.

::

    python -m examples.export_history orders exported --admin-url http://127.0.0.1:8080

The number of processes does not depend on the number of topic partitions. Each part of the read is
one file, in order within a topic partition; a process holds one record batch of it. Nothing is
acknowledged: run it as often as you like, beside the consumers of the topic. The last line is the
``starting_position`` at which a source with a new subscription continues.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pyarrow.parquet as pq

from keyshard import KeyShardSource, Segments, SourceRead


def export(part: SourceRead, file: Path) -> int:
    """Write a part to a file, whole or not at all; return the number of its rows."""
    unfinished = file.with_suffix(".unfinished")
    with part, pq.ParquetWriter(unfinished, part.schema) as writer:
        for batch in part:
            writer.write_batch(batch)
    unfinished.replace(file)
    return int(pq.read_metadata(file).num_rows)


def main() -> None:
    """Print the number of rows, and where the export ends."""
    parser = argparse.ArgumentParser(prog="python -m examples.export_history", description=__doc__)
    parser.add_argument("topic")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--service-url", default="pulsar://127.0.0.1:6650")
    parser.add_argument("--admin-url", default="http://127.0.0.1:8080")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--parts", type=int, default=8, help="number of files at most")
    parser.add_argument("--segments", choices=["broker", "auto", "bookies"], default="broker")
    arguments = parser.parse_args()
    source = KeyShardSource(
        arguments.topic, service_url=arguments.service_url, admin_url=arguments.admin_url
    )
    rows = source.read(segments=Segments(arguments.segments))
    parts = rows.split(arguments.parts)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    files = [arguments.folder / f"part-{number:05}.parquet" for number in range(len(parts))]
    with ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool:
        count = sum(pool.map(export, parts, files))
    print(count, "rows in", len(files), "files")
    print(json.dumps(rows.ends))


if __name__ == "__main__":
    main()
