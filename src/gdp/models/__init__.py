"""MODEL -> Graph: built-in workloads, files, Transformers configs, and PyTorch or JAX functions of the user's own."""
