"""Reads entries of closed ledgers from BookKeeper, without the broker. It never writes."""
