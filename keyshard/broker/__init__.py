"""The broker port and its implementations. Only this package knows Pulsar."""
