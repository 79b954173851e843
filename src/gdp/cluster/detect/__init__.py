"""The devices of this machine: DEVICES `local`.

    host.py         processor cores, memory and rates, from the operating system
    nvml.py         GPUs and the links between them, from the driver (NVML)
    gpu_figures.py  the figures of a card
    topology.py     the routes that the links make
    machine.py      the whole machine: the devices by name, GPUs as PyTorch has them, and the cluster

Figures are built-in ones or estimates; `gdp devices measure` measures them."""

from gdp.cluster.detect.machine import Detected, Machine, detect
from gdp.cluster.detect.topology import Link

__all__ = ["Detected", "Link", "Machine", "detect"]
