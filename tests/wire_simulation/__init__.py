"""The wire transport against brokers that break between any two bytes.

Faults and their positions are drawn from the seed; threads and sockets are real. The worlds of
``tests.simulation.frames`` draw most of these faults, but change threads at scheduling points only:
without the lock of a connection, some seeds fail here and none there. Only here, a broker parks
consumers that have permits, opens a consumer after the request to close it, sends entries to ended
consumers, counts absurd batches in 32 bits, and judges permits.
"""
