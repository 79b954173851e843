"""Parallel layouts: one step cut over devices, as rewrites of its graph in front of the machine model."""
