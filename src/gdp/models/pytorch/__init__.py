"""PyTorch: a training step or a forward pass, captured as a Graph to place and a Program to execute."""

from gdp.models.pytorch.capture_step import Capture, Coverage, capture, capture_fn
from gdp.models.pytorch.flops import register_flops
from gdp.models.pytorch.program import Program, Replay

__all__ = ["Capture", "Coverage", "Program", "Replay", "capture", "capture_fn", "register_flops"]
