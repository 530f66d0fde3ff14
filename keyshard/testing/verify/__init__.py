"""Loads, histories and checkers, shared by tests, benchmarks and the command line."""
