"""Layouts in the terms of the tools that train with replicas, micro-batches, ZeRO and pipelines."""
