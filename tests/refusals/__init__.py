"""What becomes of every answer that a broker can refuse a request with, at every moment."""
