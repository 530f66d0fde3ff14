"""Values of messages to Arrow columns, by the schema of their topic. No I/O."""
