"""Datasets written to a topic."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import ray

from keyshard.config.sink import SINK_ID_MAX
from keyshard.core.option_checks import check_integer, suggesting
from keyshard.errors import ConfigError, KeyShardError
from keyshard.redaction import shown
from keyshard.sink import KeyShardSink
from keyshard.threads import begin
from ray_adapter import cluster

if TYPE_CHECKING:
    from ray.data import Dataset

    from ray_adapter.datasink import DatasetReport

PROGRESS_S = 1.0
"""Time between two calls of ``on_progress``, seconds."""
ACTOR_TIMEOUT_S = 30.0
"""Longest wait for the counts, seconds."""
_log = logging.getLogger(__name__)
TASKS_MAX = 1_000_000
"""Most write tasks at a time."""
_NAME_LENGTH = 48
"""Characters that a write adds to the sink id: its own id and the index of a task."""


@suggesting
def write(
    dataset: Dataset,
    sink: KeyShardSink,
    *,
    order_by: str | Sequence[str] = (),
    concurrency: int | None = None,
    ray_remote_args: Mapping[str, Any] | None = None,
    on_progress: Callable[[DatasetReport], None] | None = None,
) -> DatasetReport:
    """Write a Ray dataset to a topic, each row once, even if tasks and nodes die meanwhile.

    ::

        sink = KeyShardSink("scores", service_url="pulsar://127.0.0.1:6650")
        report = ray_adapter.write(scores.select_columns(["value", "__key"]), sink)

    If a task dies, Ray runs it again with the same rows, and the broker drops those that it has. So
    the broker has to deduplicate the topic. Each call is a write of its own: if it fails, and the
    program calls it again, the rows of the first call stay and are stored again.

    The rows of a key keep the order of their block. Ray makes blocks and runs tasks beside each
    other, so rows of a key that lie in several blocks have no order among each other, even if one
    task writes them. To order them, bring each key into one block, such as with
    ``dataset.repartition(8, keys=["__key"])``, and give ``order_by``; or write with
    ``concurrency=1`` and ``DataContext.execution_options.preserve_order``.

    A repeated task gets the blocks of its first attempt. If their node died, Ray computes them
    again. If that gives other rows, or the rows of a key in another order, rows may be lost or
    stored twice. Store such a dataset first, such as with ``dataset.write_parquet``, and write what
    is stored.

    Args:
        dataset: Columns ``value`` (binary or text), and optionally ``__key`` or ``__keyBytes``,
            ``__orderingKey``, ``__eventTime``, ``__properties`` and ``__deliverAt``. Column
            ``__topic`` names the topic of each row, instead of the topic of the sink.
        sink: The topic, its connection and limits. Its ``sink_id`` becomes the first part of the
            producer names, by default ``ray``. If its connection has an ``admin_url``, this checks
            deduplication before the first row; else a task does with its first entry.
        order_by: Columns that order the rows of each key in a task. Other columns than those above
            only order the rows, and are not written.
        concurrency: Most write tasks at a time; ``None`` for Ray's choice.
        ray_remote_args: Ray's options for each write task.
        on_progress: Called about once a second with the counts until then, in a thread of its own.
            If it raises, it is logged, and not called again.

    Returns:
        Rows, bytes, entries, and the rows that earlier attempts of tasks had stored.

    Raises:
        ConfigError: An argument or a column does not fit. Nothing was written, unless only a later
            block has another column or type.
        TopicNotFoundError: The topic does not exist.
        DeduplicationError: The broker does not deduplicate the topic.
        KeyShardError: A task failed at its last attempt. Confirmed rows stay in the topic.
    """
    from ray.data import Dataset  # noqa: PLC0415 - takes seconds
    from ray.data.datasource import Datasink  # noqa: PLC0415
    from ray.exceptions import RayTaskError  # noqa: PLC0415

    from ray_adapter.datasink import KeyShardDatasink  # noqa: PLC0415 - imports ray.data

    if not isinstance(dataset, Dataset):
        raise ConfigError(f"dataset is {shown(dataset)}; it must be a ray.data.Dataset.")
    if not isinstance(sink, KeyShardSink):
        raise ConfigError(f"sink is {shown(sink)}.", "Give a keyshard.KeyShardSink.")
    if sink.how_to_connect().in_memory:
        raise ConfigError(
            f"{sink.service_url} is an in-memory cluster of this process, which Ray's workers "
            "cannot reach.",
            "Use the URL of a broker.",
        )
    if len(sink.sink_id or "") > SINK_ID_MAX - _NAME_LENGTH:
        raise ConfigError(
            f"sink_id has {len(sink.sink_id or '')} characters; a write of a dataset needs one of "
            f"at most {SINK_ID_MAX - _NAME_LENGTH}."
        )
    if concurrency is not None:
        check_integer("concurrency", concurrency, 1, TASKS_MAX)
    columns = [order_by] if isinstance(order_by, str) else order_by
    if not isinstance(columns, Sequence) or not all(
        isinstance(name, str) and name for name in columns
    ):
        raise ConfigError(f"order_by is {shown(order_by)}.", "Give names of columns.")
    if not isinstance(ray_remote_args, Mapping | None):
        raise ConfigError(
            f"ray_remote_args is {shown(ray_remote_args)}.", "Give a dict of options of Ray."
        )
    if on_progress is not None and not callable(on_progress):
        raise ConfigError(f"on_progress is {shown(on_progress)}.", "Give a function.")
    if not hasattr(Datasink, "min_bytes_per_write"):
        raise ConfigError(
            f"Ray {ray.__version__} may make rows again when it repeats their write task, so that "
            "other rows could be lost or stored twice.",
            "Install Ray 2.60 or newer to write.",
        )
    try:
        with _reporting(on_progress) as progress:
            datasink = KeyShardDatasink(sink, columns, progress)
            dataset.write_datasink(
                datasink, concurrency=concurrency, ray_remote_args=dict(ray_remote_args or {})
            )
    except RayTaskError as exc:
        if isinstance(exc.cause, KeyShardError):
            raise exc.cause from None
        raise
    return datasink.report


@contextmanager
def _reporting(on_progress: Callable[[DatasetReport], None] | None) -> Iterator[Any]:
    """Yield an actor that adds up counts, and call a function with them until the block ends."""
    if on_progress is None:
        yield None
        return
    from ray_adapter.datasink import Progress  # noqa: PLC0415 - imports ray.data

    cluster.connect()
    actor = ray.remote(Progress).options(num_cpus=0).remote()
    ended = threading.Event()

    def report() -> None:
        while True:
            last = ended.wait(PROGRESS_S)
            on_progress(ray.get(actor.total.remote(), timeout=ACTOR_TIMEOUT_S))
            if last:
                return

    thread = begin(
        "keyshard-ray-progress",
        report,
        fail=lambda exc: _log.warning("no more progress: %s", exc.summary),
    )
    try:
        yield actor
    finally:
        ended.set()
        thread.join(ACTOR_TIMEOUT_S)
        ray.kill(actor)
