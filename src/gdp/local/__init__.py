"""The devices of this machine, found without PyTorch: what DEVICES `local` stands for.

    host.py       processor cores, memory and rates, from the operating system
    nvml.py       GPUs and the links between them, from the driver (NVML)
    visible.py    which of the GPUs are cuda0, cuda1, ..., in CUDA's order
    figures.py    what a card can do
    routes.py     the routes that the links make
    machine.py    all of it put together: the devices by name, and the cluster

Figures are built-in ones or estimates; `gdp devices measure` measures them.
"""

from gdp.local.machine import Detected, Machine, detect
from gdp.local.routes import Link

__all__ = ["Detected", "Link", "Machine", "detect"]
