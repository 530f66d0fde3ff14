"""Consumers that other processes host: the broker port, with its receiving spread over workers.

A worker, on this machine or another one, connects to the broker, has consumers, and turns what they
receive into blocks of entries; that is where the time goes. This process gets whole deliveries over
Arrow Flight and decides everything: window, cut, checkpoint, and what is acknowledged when.

What may go wrong with a worker is what may go wrong with a connection. A worker that dies has lost
its connections: its consumers are away, their queues are emptied, and what they had not
acknowledged comes again to those that take their places. All above the port knows how to live with
that already.
"""
