"""A cluster file of two cores and a module of small models, to place and to run."""

CLUSTER = """
format: gdp-cluster
version: 1
name: two cores
devices:
  - {name: cpu0, kind: core, memory: 1GiB, flops: {float32: 1e11}, memory_bandwidth: 10GB/s, launch: 10us}
  - {name: cpu1, kind: core, memory: 1GiB, flops: {float32: 1e11}, memory_bandwidth: 10GB/s, launch: 10us}
links: [{from: "*", to: "*", bandwidth: 1e15, latency: 30us, channels: []}]
"""
MODEL = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Linear(32, 32), nn.Dropout(dropout), nn.ReLU()) for _ in range(2))
    def forward(self, x):
        return (self.left(x) - self.right(x)).square().mean()
def net():
    return Net(0.0).eval(), (torch.randn(8, 32),)
def dropping():
    return Net(0.5), (torch.randn(8, 32),)
def wide():
    return Net(0.0).eval(), (torch.randn(9, 32),)
"""
