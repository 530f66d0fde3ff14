"""Memory as a property: for any messages, a source with a slow sink stays below a limit.

The limit holds for each process of a source: ``window_bytes_max`` x 2 + 200 MB. Memory
that a process takes before it opens the source is subtracted. The tests measure the peak of the
resident memory (``VmHWM``) since then; of a worker process, from its start. Each consumer
holds one entry whatever the window is, so no shape has more consumers than fit below the limit.

Ways: ``embedded`` and ``hosted`` (two worker processes) read batches in the process of the source;
``spark`` is the stream process of a query, with its tasks in it; ``batch`` is a bounded read, whose
plan says that entries are small; ``ray`` is a job, its actors, or the task of a bounded read.
"""
