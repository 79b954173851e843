"""`vllm`: decoder layers by pipeline rank, as environment variables.

`VLLM_PP_LAYER_PARTITION` gives the number of layers of each rank (vllm/distributed/utils.py, get_pp_indices); the
embedding is on the first rank, the last norm and the head are on the last.
"""

import itertools

import numpy as np

from gdp.export.chains import find_layers
from gdp.export.checks import check_inference
from gdp.export.stage_text import gpus, rank_devices, read_variables, spread, visible_devices
from gdp.export.target import Target, stage_starts
from gdp.export.units import Units
from gdp.graph import I64
from gdp.problem import Problem

NAME = "vllm"


def read_units(problem: Problem) -> Units:
    """A unit for each decoder layer; what comes before them goes with the first, what comes after with the last.
    InputError for a training step."""
    check_inference(problem, NAME)
    layers = find_layers(problem)
    positions = np.clip(layers.positions - 1, 0, len(layers.names) - 1)
    return Units.chain(problem, positions, layers.names, devices=gpus(problem, NAME))


def write(problem: Problem, units: Units, devices: I64) -> str:
    """`VLLM_PP_LAYER_PARTITION=10,11,11` and the GPUs in the order of ranks."""
    starts = [*stage_starts(devices), units.num_units]
    sizes = [sum(map(len, units.members[a:b])) for a, b in itertools.pairwise(starts)]
    return (
        f"# vllm serve MODEL --pipeline-parallel-size {len(sizes)}\n"
        f"VLLM_PP_LAYER_PARTITION={','.join(map(str, sizes))}\n{visible_devices(problem, devices)}\n"
    )


def parse(text: str, problem: Problem, units: Units) -> I64:
    """[U] from such variables."""
    variables = read_variables(text, NAME)
    sizes = list(map(int, variables["VLLM_PP_LAYER_PARTITION"].split(",")))
    return spread(rank_devices(problem, variables), sizes, units.members, NAME)


TARGET = Target(NAME, "whole decoder layers by rank", "vllm.env", read_units, write, parse)
