"""What is received and not yet released, and how much of it makes a batch."""
