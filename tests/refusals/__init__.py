"""The outcome of every refusal of a request, at every moment."""
