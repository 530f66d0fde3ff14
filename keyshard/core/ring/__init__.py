"""The ring of hash slots: ranges, their owners, and their moves."""
