"""Packs an environment with keyshard, and runs a query with it on an executor of its own JVM.

    python -m examples.deploy.packed_query keyshard-0.1.0-py3-none-any.whl --folder build/packed

It takes the steps of docs/how-to/deploy.md, with ``--master local-cluster[1,1,1024]`` in client
mode, on a development broker. Without ``--folder``, the files are removed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

MASTER = "local-cluster[1,1,1024]"
MESSAGES = 2_000
STEP_S = 1_200.0
"""Longest time of one step, seconds; the longest one installs the dependencies."""
PYTHON = "./environment/bin/python"
"""Interpreter of the archive, for the driver and the executors."""


def main() -> None:
    """Pack, submit, and check what the query did.

    Raises:
        SystemExit: A step failed, or the query lacks rows or ran another interpreter.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheel", type=Path, help="wheel of keyshard, as `make wheel` builds it")
    parser.add_argument("--folder", type=Path, help="folder for the environment and its archive")
    arguments = parser.parse_args()
    with TemporaryDirectory() as name:
        folder = (arguments.folder or Path(name)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        began_s = time.monotonic()
        archive = packed(arguments.wheel.resolve(), folder)
        packed_s = time.monotonic() - began_s
        said = submitted(archive, folder)
    outside = [part for part in said["executors"] if "/environment/bin/python" not in part]
    if said["rows"] != MESSAGES or outside or not said["executors"]:
        raise SystemExit(f"The query did not run as it should: {said}.")
    whole_s = time.monotonic() - began_s
    print(f"{said['rows']:,} of {MESSAGES:,} messages read by {said['executors'][0]}.")
    print(f"Packed in {packed_s:.0f} s, all in {whole_s:.0f} s.")


def packed(wheel: Path, folder: Path) -> Path:
    """Make an environment with a wheel of keyshard, and pack it; return the archive."""
    run(folder, sys.executable, "-m", "venv", "env")
    wanted = f"keyshard[schemas] @ {wheel.as_uri()}"
    run(folder, "env/bin/pip", "install", "--quiet", wanted, "pandas", "venv-pack", "setuptools<81")
    run(folder, "env/bin/venv-pack", "-p", "env", "-o", "env.tar.gz", "--force", "--quiet")
    shutil.rmtree(folder / "environment", ignore_errors=True)
    (folder / "environment").mkdir()
    # In client mode, the driver does not unpack the archive.
    run(folder, "tar", "-xzf", "env.tar.gz", "-C", "environment")
    return folder / "env.tar.gz"


def submitted(archive: Path, folder: Path) -> dict[str, Any]:
    """Submit the query with an archive, and return what it prints."""
    from pyspark.find_spark_home import _find_spark_home  # noqa: PLC0415 - the driver has its own

    from keyshard.testing.devbroker import DevBroker, java_home  # noqa: PLC0415
    from keyshard.testing.verify.workloads import (  # noqa: PLC0415
        Workload,
        create_partitioned_topic,
        produce,
    )

    # A local cluster works in a folder of SPARK_HOME, so it gets one of its own.
    spark_home = folder / "spark"
    spark_home.mkdir(exist_ok=True)
    for one in Path(_find_spark_home()).iterdir():
        if one.name != "work" and not (spark_home / one.name).exists():
            (spark_home / one.name).symlink_to(one)
    environment = {
        name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ
    }
    environment |= {
        "JAVA_HOME": str(java_home()), "SPARK_HOME": str(spark_home), "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": PYTHON,
    }  # fmt: skip
    with DevBroker() as broker:
        create_partitioned_topic(broker.admin_url, "packed", 3)
        produce(Workload(MESSAGES, keys=100), broker.service_url, "packed")
        output = run(
            folder, f"{spark_home}/bin/spark-submit", "--master", MASTER,
            "--archives", f"{archive}#environment", "--conf", "spark.ui.enabled=false",
            __file__, "--query", broker.service_url, broker.admin_url,
            environment=environment,
        )  # fmt: skip
    said: dict[str, Any] = json.loads(output.splitlines()[-1])
    return said


def query(service_url: str, admin_url: str) -> None:
    """Read the topic as a bounded stream into files, and print what ran."""
    from pyspark.sql import SparkSession  # noqa: PLC0415 - only the driver has it

    import spark_adapter  # noqa: PLC0415

    spark = SparkSession.builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    spark_adapter.register(spark)
    rows = (
        spark.readStream.format("keyshard")
        .options(topic="packed", subscription="packed", startingOffsets="earliest", parallelism=4)
        .option("service.url", service_url)
        .option("admin.url", admin_url)
        .load()
    )
    with TemporaryDirectory() as name:
        sink = rows.writeStream.format("parquet").option("checkpointLocation", f"{name}/checkpoint")
        sink.trigger(availableNow=True).start(f"{name}/rows").awaitTermination()
        count = spark.read.parquet(f"{name}/rows").count()
    executors = spark.sparkContext.parallelize([0], 1).map(lambda _: sys.executable).collect()
    spark.stop()
    print(json.dumps({"rows": count, "driver": sys.executable, "executors": executors}))


def run(folder: Path, *command: str, environment: dict[str, str] | None = None) -> str:
    """Run a command in a folder, and return its output; its errors are shown."""
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, timeout=STEP_S,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stdout[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    if sys.argv[1:2] == ["--query"]:
        query(*sys.argv[2:])
    else:
        main()
