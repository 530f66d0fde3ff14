"""Names of things at the broker, and exact sets of them: the position of a source."""
