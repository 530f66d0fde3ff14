"""Bounded reads of topic partitions with Readers, and proofs of absence."""
