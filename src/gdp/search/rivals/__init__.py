"""Rivals: the parallel steps that users run today, each the best of its kind by simulation."""
