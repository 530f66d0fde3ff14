"""Sources without a host engine: handlers by key, retries, parking, batches, and their status."""
