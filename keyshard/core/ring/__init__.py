"""The ring of hash slots: ranges, who owns them, and how they move."""
