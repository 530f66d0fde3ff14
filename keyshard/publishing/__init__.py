"""Publishing: batches exactly once, and single messages."""
