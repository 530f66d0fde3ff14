"""User options: the source, its handlers, the connection."""
