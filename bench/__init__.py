"""Benchmarks. Each answers one question and writes one JSON object."""
