"""The second world: ``source.run`` and ``source.batches`` under the simulated scheduler.

The handler run, its threads, its dead letters and its rescaling are the real ones; the handler, the
storage of checkpoints and whoever operates the source are modelled. See :mod:`.world`.
"""
