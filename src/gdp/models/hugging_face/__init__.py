"""Transformers and Diffusers: the model that a config describes, with inputs made from it."""
