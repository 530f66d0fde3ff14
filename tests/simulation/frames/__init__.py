"""The same runs over frames: the wire transport between the runtime and the in-memory broker.

Sockets, polls and answers are simulated, so that a seed is one course of events here as well.
"""
