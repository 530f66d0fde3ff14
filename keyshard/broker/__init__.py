"""The only place that knows Pulsar: the port, and what stands behind it."""
