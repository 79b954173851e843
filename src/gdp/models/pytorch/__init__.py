"""PyTorch: a training step or a forward pass, captured as a Graph to place and a Program to execute."""

from gdp.models.pytorch.flops import register_flops
from gdp.models.pytorch.program import Program, Replay
from gdp.models.pytorch.step import Capture, Coverage, capture, capture_fn

__all__ = ["Capture", "Coverage", "Program", "Replay", "capture", "capture_fn", "register_flops"]
