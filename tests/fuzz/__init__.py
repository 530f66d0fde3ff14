"""Seeded attacks on the public API: options, checkpoints, messages and exceptions."""
