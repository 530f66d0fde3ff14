"""Benchmarks: each states one question and writes one JSON object."""
