"""Devices as the tools count them: GPUs by number, CPUs apart."""

import numpy as np

from gdp.arrays import Bool
from gdp.simulator.problem import Problem


def is_cpu(problem: Problem) -> Bool:
    """[D] Returns which devices are CPUs, by kind or name."""
    devices = problem.cluster.devices
    return np.array(["cpu" in device.kind.lower() or device.name.lower().startswith("cpu") for device in devices])


def gpu_numbers(problem: Problem) -> list[int]:
    """[D] Returns the number of each GPU, counted in the cluster's order; -1 for a CPU."""
    cpus = is_cpu(problem)
    numbers: list[int] = np.where(cpus, -1, np.cumsum(~cpus) - 1).tolist()
    return numbers
