"""Where the rows of the benchmark `measured` come from: one source a file, over `benchmarks/data/measured`.

START HERE: source.py
"""
