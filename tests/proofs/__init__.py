"""One command for every search by seed: ``python -m tests.proofs NAME``."""
