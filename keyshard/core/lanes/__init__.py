"""Selection of the next message for a handler, and the outcome of each message."""
