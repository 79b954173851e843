"""Execution of steps that are cut into micro-batches and replicas."""
