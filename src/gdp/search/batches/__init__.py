"""The search for copies of a model, cut into stages, that serve several batches at a time."""
