"""Spark streams with everything on at once, on a real broker, under faults drawn from a seed."""
