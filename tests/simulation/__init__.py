"""Seeded simulation: the real runtime on the in-memory broker, under a scheduler that owns time.

One seed decides everything: the next thread, the delays of the network, the death of a process
and the memory loss of the broker. ``python -m tests.proofs simulation`` runs seeds; see
:mod:`.world`.
"""
