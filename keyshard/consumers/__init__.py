"""Consumers of hash ranges: they receive into the window, acknowledge, and reconnect."""
