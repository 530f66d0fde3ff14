"""The coordinator: assigns ranges, cuts batches, commits, and resolves ack gaps."""
