"""Identifiers of the broker's objects, and exact sets of them: the position of a source."""
