"""Capture of PyTorch training steps and inference, and of JAX functions: a Graph to place and a program to execute."""

from gdp.capture.flops import register_flops
from gdp.capture.jax_function import JaxCapture, capture_jax
from gdp.capture.program import Program, Replay
from gdp.capture.step import Capture, Coverage, capture, capture_fn

__all__ = [
    "Capture", "Coverage", "JaxCapture", "Program", "Replay", "capture", "capture_fn", "capture_jax", "register_flops",
]  # fmt: skip
