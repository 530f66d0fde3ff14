"""Chaos on a real broker: faults by a seed, and the verdict of the checkers."""
