"""Draws architectures by the thousand: real PyTorch modules, captured as training steps, to train policies on.

families/ -> draw.py: one module by (seed, number), captured; drawn again if it is not wanted
             likeness.py: likeness to built-in workloads, which are to be new to a trained policy
             drawn_set.py: a directory of them, which `gdp train` reads
"""
