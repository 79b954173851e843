"""Capture of PyTorch training steps and inference: a Graph to place and a Program to execute."""

from gdp.capture.flops import register_flops
from gdp.capture.program import Program, Replay
from gdp.capture.step import Capture, Coverage, capture, capture_fn

__all__ = ["Capture", "Coverage", "Program", "Replay", "capture", "capture_fn", "register_flops"]
