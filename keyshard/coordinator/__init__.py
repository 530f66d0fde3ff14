"""Loops that move data, and call core for every decision."""
