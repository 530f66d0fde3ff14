"""Which message a handler gets next, and what becomes of it."""
