"""A plan on the processor cores of one host, a process for each, which share memory."""
