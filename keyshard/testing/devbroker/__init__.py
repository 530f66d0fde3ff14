"""A real Pulsar broker on this machine, fetched and started on demand."""

from keyshard.core.releases import DEFAULT_VERSION
from keyshard.testing.devbroker.cluster import DevCluster
from keyshard.testing.devbroker.devbroker import DevBroker
from keyshard.testing.devbroker.distribution import install, installed
from keyshard.testing.devbroker.java import java_home

__all__ = ["DEFAULT_VERSION", "DevBroker", "DevCluster", "install", "installed", "java_home"]
