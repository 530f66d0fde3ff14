"""Reads ledgers that brokers offloaded to an object store or a file system."""
