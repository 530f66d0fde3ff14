"""Observability of a source: status, control socket, metrics, doctor."""
