"""Every way to read a topic gives its messages, or names their absence by a code and a count."""
