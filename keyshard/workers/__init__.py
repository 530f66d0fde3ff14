"""Worker processes that host consumers. A source uses them through ``RemoteBroker``."""
