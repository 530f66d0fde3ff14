"""A real Pulsar broker on this machine, fetched and started on demand."""

from keyshard.devbroker.devbroker import DevBroker
from keyshard.devbroker.distribution import DEFAULT_VERSION, install, installed
from keyshard.devbroker.java import java_home

__all__ = ["DEFAULT_VERSION", "DevBroker", "install", "installed", "java_home"]
