"""Bytes of messages to Arrow columns."""
