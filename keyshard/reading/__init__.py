"""Reads stretches of topic partitions with Readers, and proves what is not there."""
