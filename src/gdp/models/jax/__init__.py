"""JAX: the graph of a function, from its jaxpr."""

from gdp.models.jax.capture_function import JaxCapture, capture_jax

__all__ = ["JaxCapture", "capture_jax"]
