"""The table of the ways to read a topic, and the outcome of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from keyshard.errors import KeyShardError
from tests.streams.cluster import Broker
from tests.ways import by_python, by_ray, by_spark
from tests.ways.draw import Published, Reading
from tests.ways.outcome import Outcome, Place

_CODE = "[KEYSHARD_"
_WAYS: Mapping[str, Callable[[Place, Published, Reading, Outcome], None]] = {
    "spark batch": by_spark.batch,
    "spark stream": by_spark.stream,
    "table": by_spark.table,
    "table stream": by_spark.table_stream,
    "embedded": by_python.opened,
    "batches": by_python.batches,
    "handlers": by_python.handlers,
    "coroutines": by_python.coroutines,
    "taken": by_python.taken,
    "park": by_python.parked,
    "read": by_python.bounded,
    "ray": by_ray.dataset,
    "ray job": by_ray.job,
}


class Reader:
    """Reads topics of one broker in every way.

    Args:
        broker: Where they are.
        spark: A session.
        directory: For checkpoints.
    """

    def __init__(self, broker: Broker, spark: SparkSession, directory: Path) -> None:
        self._broker = broker
        self._spark = spark
        self._directory = directory
        self._number = 0

    def read(self, made: Published, how: Reading) -> Outcome:
        """Read a topic in one way.

        Args:
            made: The topic.
            how: The way.
        """
        self._number += 1
        place = Place(self._broker, self._spark, self._directory, f"ways-{self._number}")
        outcome = Outcome()
        try:
            _WAYS[how.way](place, made, how, outcome)
        except KeyShardError as exc:
            outcome.code, outcome.error = exc.code, str(exc)
        except PySparkException as exc:
            outcome.error = str(exc)
            outcome.code = _code(str(exc))
        except Exception as exc:  # noqa: BLE001 - Ray's errors carry ours in their text
            outcome.error = f"{type(exc).__name__}: {exc}"
            outcome.code = _code(str(exc))
        return outcome


def _code(text: str) -> str:
    """The code that an error's text names."""
    _, found, rest = text.partition(_CODE)
    return f"KEYSHARD_{rest.partition(']')[0]}" if found else ""
