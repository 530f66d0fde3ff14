"""The wire transport against brokers that speak frames and break between any two bytes.

Real threads and sockets; what goes wrong, and where, is drawn from the seed.
"""
