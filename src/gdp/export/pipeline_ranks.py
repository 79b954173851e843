"""Environment files of the targets that number their pipeline ranks: a layout and the GPUs in the order of ranks."""

from collections.abc import Callable

import numpy as np

from gdp.arrays import I64, Bool
from gdp.errors import InputError
from gdp.export.export_target import gpu_numbers, is_cpu, stage_starts, wrong_content
from gdp.export.export_units import ExportUnits
from gdp.simulator.problem import Problem

_GPUS = "CUDA_VISIBLE_DEVICES"


def gpus(problem: Problem, target: str) -> Bool:
    """[D] Returns which devices are GPUs, since no other can be a rank; InputError if there are none."""
    is_gpu = ~is_cpu(problem)
    if not is_gpu.any():
        raise InputError(f"{target}: a rank is a GPU, and {problem.cluster.name!r} has none; add one")
    return np.asarray(is_gpu)


def write_ranks(problem: Problem, devices: I64, command: str, variable: str) -> str:
    """Writes the command as a comment, the `NAME=value` of a layout, and the GPU of each rank."""
    numbers = np.array(gpu_numbers(problem))[devices[stage_starts(devices)]]
    return f"# {command}\n{variable}\n{_GPUS}={','.join(map(str, numbers))}\n"


def parse_ranks(
    text: str, problem: Problem, units: ExportUnits, variable: str, sizes_of: Callable[[str], list[int]], target: str
) -> I64:
    """[U] Inverts `write_ranks`; `sizes_of` reads the number of layers of each rank from the value of `variable`."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    if any("=" not in line for line in lines):
        raise wrong_content(target, "a line is no NAME=value")
    values = {name: value for name, _, value in (line.partition("=") for line in lines)}
    numbers = gpu_numbers(problem)
    ranks = np.array([numbers.index(int(number)) for number in values[_GPUS].split(",")], np.int64)
    by_layer = np.repeat(ranks, sizes_of(values[variable]))
    ends = np.cumsum([len(layers) for layers in units.members])
    if not len(by_layer) or ends[-1] != len(by_layer):
        raise wrong_content(target, f"it has {len(by_layer)} layers, the graph {ends[-1]}")
    return np.asarray(by_layer[ends - 1])
