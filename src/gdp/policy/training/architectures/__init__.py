"""Architectures by the thousand: real PyTorch modules drawn from a seed, captured as training steps.

families/ -> draw.py: one module by (seed, number), captured; drawn again if it is not wanted
             likeness.py: likeness to built-in workloads, which are to be new to a trained policy
"""
