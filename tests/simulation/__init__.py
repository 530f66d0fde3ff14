"""Seeded simulation: the real runtime on the in-memory broker, under a scheduler that owns time.

One seed decides everything: which thread runs next, how long the network takes, when a process
dies and what the broker forgets. ``python -m tests.simulation`` runs seeds; see :mod:`.world`.
"""
