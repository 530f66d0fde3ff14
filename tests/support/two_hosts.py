"""A Spark cluster of two executors with addresses of their own, in the JVM of the driver.

Spark starts a second attempt of a task on another host only. The executors of ``local-cluster``
share one, so none of their tasks ever runs twice at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pyspark
from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from keyshard.testing.devbroker import java_home

ROOT = Path(__file__).parents[2]
HOSTS = ("127.0.0.1", "127.0.0.2")
CORES, MEMORY_MB = 1, 1024
"""Of each executor."""
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": HOSTS[0],
    "spark.driver.bindAddress": HOSTS[0],
    "spark.sql.session.timeZone": "UTC",
}
"""Settings of the session of a test program, on any cluster."""


def prepare() -> None:
    """Set the variables from which Spark starts its JVM and its Python workers."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["JAVA_HOME"] = str(java_home())
    os.environ["SPARK_HOME"] = str(Path(pyspark.__file__).parent)


def session(settings: Mapping[str, str], work: Path) -> SparkSession:
    """Start the cluster, and return a session on it.

    Args:
        settings: Settings of Spark, in addition to :data:`SETTINGS`.
        work: Folder of the executors, which is made.
    """
    prepare()
    executors = {"spark.executorEnv.PYTHONPATH": str(ROOT), "spark.executor.memory": "512m"}
    every = list((SETTINGS | executors | dict(settings)).items())
    gateway = launch_gateway(SparkConf().setAll(every))
    jvm = gateway.jvm
    conf = SparkConf(_jvm=jvm).setAll(every)
    deploy, option = jvm.org.apache.spark.deploy, jvm.scala.Option
    master = deploy.master.Master.startRpcEnvAndEndpoint(HOSTS[0], 0, 0, conf._jconf)
    urls = gateway.new_array(jvm.java.lang.String, 1)
    urls[0] = f"spark://{master._1().address().hostPort()}"
    for number, host in enumerate(HOSTS):
        deploy.worker.Worker.startRpcEnvAndEndpoint(
            host, 0, 0, CORES, MEMORY_MB, urls, str(work), option.apply(number), conf._jconf,
            option.empty(),
        )  # fmt: skip
    context = SparkContext(master=urls[0], conf=conf, gateway=gateway)
    context.setLogLevel("WARN")
    return SparkSession(context)
