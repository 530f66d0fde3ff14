"""What the broker shows about entries that never came."""
