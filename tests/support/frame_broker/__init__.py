"""Brokers that speak frames: sessions, a server on loopback, and topics whose entries they send.

Faults, scripts and refusals are those of subclasses. The brokers of unit tests, ``tests.refusals``,
``tests.wire_simulation``, ``tests.memory`` and the simulated ones share this.
"""
