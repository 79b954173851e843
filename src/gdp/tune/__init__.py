"""Tuning: candidates are measured, errors of predictions are learned, and the fastest measured one is the answer."""
