"""Families of drawn architectures: modules of their own, which share no code with the built-in workloads."""
