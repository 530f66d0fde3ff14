"""What users set: the source, its handlers, the connection."""
