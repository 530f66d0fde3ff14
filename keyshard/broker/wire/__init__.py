"""The broker port on Pulsar's binary protocol: whole entries, decoded in bulk (ADR 0021)."""
