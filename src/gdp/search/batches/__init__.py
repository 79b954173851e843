"""How to serve several batches at a time: copies of a model, cut into stages."""
