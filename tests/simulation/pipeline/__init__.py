"""The world of a query that reads a topic and writes another."""
