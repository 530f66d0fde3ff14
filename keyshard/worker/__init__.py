"""What there may be several of: consumers of ranges, their acknowledgements, rows for tasks."""
