"""Costs: the kernels that ops are, and what they take on devices."""
