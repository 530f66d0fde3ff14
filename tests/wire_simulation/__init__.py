"""The wire transport against brokers that break between any two bytes.

Faults and their positions are drawn from the seed; threads and sockets are real. The worlds of
``tests.simulation.frames`` draw most of these faults, but their threads change only at scheduling
points: without the lock of a connection, frames of two threads mix here, and all seeds hold there.
Only here, a broker parks consumers that have permits, opens a consumer after the request to close
it, sends entries to ended consumers, counts absurd batches in 32 bits, and judges permits.
"""
