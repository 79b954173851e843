"""Which of some ways to run a step is the fastest, found with few measurements.

replay.py: the benchmark; arms.py: all arms, and those that measure in the order of something known before
learning.py: networks that learn by measured rewards; published.py: HDP-like and GDP; scorer.py: gdp's policy
drawn_choices.py: choices of drawn machines, in simulation; elsewhere.py: what other machines teach; user_file.py

START HERE: replay.py
"""

from benchmarks.few_measurements.replay import FewMeasurementsBenchmark

__all__ = ["FewMeasurementsBenchmark"]
