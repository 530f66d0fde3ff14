"""The dead-letter topic of a source: written, read back, and replayed key by key."""
