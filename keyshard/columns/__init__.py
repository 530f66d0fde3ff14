"""Messages as Arrow columns: their content, and values decoded by a schema."""
