"""Worker processes that host consumers. A source uses them through the broker port."""
