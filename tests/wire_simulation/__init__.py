"""The wire transport against brokers that break between any two bytes.

Real threads and sockets; faults and their positions are drawn from the seed.
"""
