"""Entries that are received and not released, and the batches made of them."""
