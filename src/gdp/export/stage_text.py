"""What the targets that number their pipeline ranks write alike: GPUs in the order of ranks, environment lines."""

from collections.abc import Sequence

import numpy as np

from gdp.errors import InputError
from gdp.export.target import accelerator_numbers, stage_devices, wrong_content
from gdp.export.units import is_cpu
from gdp.graph import I64, Bool
from gdp.problem import Problem


def gpus(problem: Problem, target: str) -> Bool:
    """[D] the GPUs, which alone can be ranks. InputError if there are none."""
    found = ~is_cpu(problem)
    if not found.any():
        raise InputError(f"{target}: a rank is a GPU, and {problem.cluster.name!r} has none; add one")
    return np.asarray(found)


def visible_devices(problem: Problem, devices: I64) -> str:
    """`CUDA_VISIBLE_DEVICES=0,2,1`: the GPU of each rank."""
    numbers = accelerator_numbers(problem)
    return f"CUDA_VISIBLE_DEVICES={','.join(str(numbers[device]) for device in stage_devices(devices))}"


def read_variables(text: str, target: str) -> dict[str, str]:
    """The lines `NAME=value`; comments (`# ...`) are left out."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    if any("=" not in line for line in lines):
        raise wrong_content(target, "a line is no NAME=value")
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def rank_devices(problem: Problem, variables: dict[str, str]) -> list[int]:
    """The device of each rank, from `CUDA_VISIBLE_DEVICES`."""
    numbers = accelerator_numbers(problem)
    return [numbers.index(int(number)) for number in variables["CUDA_VISIBLE_DEVICES"].split(",")]


def spread(rank_of: Sequence[int], sizes: Sequence[int], names: Sequence[Sequence[str]], target: str) -> I64:
    """[U] the device of each unit, from the device and the number of layers of each rank; `names` [U] are the layers of
    units."""
    by_layer = np.repeat(np.array(rank_of, np.int64), sizes)
    ends = np.cumsum([len(found) for found in names])
    if not len(by_layer) or ends[-1] != len(by_layer):
        raise wrong_content(target, f"it has {len(by_layer)} layers, the graph {ends[-1]}")
    return np.asarray(by_layer[ends - 1])
