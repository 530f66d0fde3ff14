"""What proves a consumer: a real broker on this machine, recorded histories, and their checkers."""
