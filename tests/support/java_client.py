"""Pulsar's Java client in a JVM of its own.

Its jars are part of the broker's distribution. py4j, a part of PySpark, calls them without a
compiler.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pyspark
from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

from keyshard.testing.devbroker import install, java_home
from tests.support.deadlines import deadline

_OPTIONS = ["-Xmx192m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
"""Little memory, and no optimising of what ends soon."""
_RECONNECT_MAX_S = 2
_END_S = deadline(10)


class JavaClient:
    """A JVM with a client; it runs until :meth:`close`.

    Args:
        service_url: URL of the broker.
        log: File for what the JVM says.
    """

    def __init__(self, service_url: str, log: Path) -> None:
        (bridge,) = (Path(pyspark.__file__).parent / "jars").glob("py4j-*.jar")
        with log.open("wb") as file:
            port, self._process = launch_gateway(
                jarpath=str(bridge),
                classpath=str(install() / "lib" / "*"),
                javaopts=_OPTIONS,
                java_path=str(java_home() / "bin" / "java"),
                redirect_stderr=file,
                die_on_exit=True,
                return_proc=True,
            )
        self._gateway = JavaGateway(gateway_parameters=GatewayParameters(port=port))
        self.jvm: Any = self._gateway.jvm
        self.api: Any = self.jvm.org.apache.pulsar.client.api
        """Package ``org.apache.pulsar.client.api``."""
        units = self.jvm.java.util.concurrent.TimeUnit
        self.seconds, self.milliseconds = units.SECONDS, units.MILLISECONDS
        self.client: Any = (
            self.api.PulsarClient.builder()
            .serviceUrl(service_url)
            .maxBackoffInterval(_RECONNECT_MAX_S, self.seconds)
            .build()
        )

    def close(self) -> None:
        """End the JVM."""
        # Without it, handles that are freed later are reported to a JVM that is gone.
        self._gateway.shutdown()
        self._process.kill()
        self._process.wait(_END_S)
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # the gateway may have closed it, too
                if pipe is not None:
                    pipe.close()
