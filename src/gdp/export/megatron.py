"""`megatron`: the layout of Megatron-LM's pipeline stages, `--pipeline-model-parallel-layout`.

`Et*3|t*4|t*3L` has a stage between bars: E is the embedding, t a decoder layer, L the head with the loss
(megatron/core/transformer/pipeline_parallel_layer_layout.py).
"""

import itertools
import re

from gdp.export.chains import find_layers
from gdp.export.stage_text import gpus, rank_devices, read_variables, spread, visible_devices
from gdp.export.target import Target, stage_starts
from gdp.export.units import Units
from gdp.graph import I64
from gdp.problem import Problem

NAME = "megatron"


def read_units(problem: Problem) -> Units:
    """A unit for the embedding, for each decoder layer, and for the head."""
    layers = find_layers(problem)
    return Units.chain(problem, layers.positions, ["E", *layers.names, "L"], devices=gpus(problem, NAME))


def layout(units: Units, devices: I64) -> str:
    """`Et*3|t*4|t*3L`."""
    starts = [*stage_starts(devices), units.num_units]
    stages = []
    for start, end in itertools.pairwise(starts):
        letters = "".join(_letter(name) for members in units.members[start:end] for name in members)
        stages.append(re.sub(r"t{2,}", lambda run: f"t*{len(run[0])}", letters))
    return "|".join(stages)


def write(problem: Problem, units: Units, devices: I64) -> str:
    """The layout and the GPUs in the order of ranks."""
    found = layout(units, devices)
    count = found.count("|") + 1
    return (
        f'# --pipeline-model-parallel-size {count} --pipeline-model-parallel-layout "$PIPELINE_LAYOUT"\n'
        f"PIPELINE_LAYOUT='{found}'\n{visible_devices(problem, devices)}\n"
    )


def parse(text: str, problem: Problem, units: Units) -> I64:
    """[U] from such a layout."""
    variables = read_variables(text, NAME)
    unrolled = re.sub(r"(.)\*(\d+)", lambda run: run[1] * int(run[2]), variables["PIPELINE_LAYOUT"].strip("'"))
    return spread(rank_devices(problem, variables), list(map(len, unrolled.split("|"))), units.members, NAME)


def _letter(name: str) -> str:
    return name if name in ("E", "L") else "t"


TARGET = Target(NAME, "embedding, decoder layers and head by rank", "megatron.env", read_units, write, parse)
