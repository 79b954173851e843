"""`megatron`: the layout of Megatron-LM's pipeline stages, `--pipeline-model-parallel-layout`. `Et*3|t*4|t*3L` has a
stage between bars: E is the embedding, t a decoder layer, L the head with the loss
(megatron/core/transformer/pipeline_parallel_layer_layout.py)."""

import re
from collections.abc import Iterable, Sequence

from gdp.arrays import I64
from gdp.export.export_target import ExportTarget, ExportUnits, gpus, stage_members, write_ranks
from gdp.export.module_chains import find_layers
from gdp.simulator.problem import Problem

NAME = "megatron"
_VARIABLE = "PIPELINE_LAYOUT"


def read_units(problem: Problem) -> ExportUnits:
    """Makes a unit of the embedding, of each decoder layer, and of the head."""
    layers = find_layers(problem)
    return ExportUnits.chain(problem, layers.positions, ["E", *layers.names, "L"], devices=gpus(problem, NAME))


def layout(units: ExportUnits, devices: I64) -> str:
    """Returns `Et*3|t*4|t*3L`."""
    return layout_of(stage_members(units, devices))


def layout_of(stages: Iterable[Sequence[str]]) -> str:
    """Returns `Et*3|t*4|t*3L` for the names in each stage: E, paths of layers, L."""
    letters = ("".join(name if name in ("E", "L") else "t" for name in names) for names in stages)
    return "|".join(re.sub(r"t{2,}", lambda run: f"t*{len(run[0])}", stage) for stage in letters)


def write(problem: Problem, units: ExportUnits, devices: I64) -> str:
    """Writes the layout and the GPUs in the order of ranks."""
    stages = layout(units, devices)
    size = stages.count("|") + 1
    command = f'--pipeline-model-parallel-size {size} --pipeline-model-parallel-layout "${_VARIABLE}"'
    return write_ranks(problem, devices, command, f"{_VARIABLE}='{stages}'", NAME)


TARGET = ExportTarget(NAME, "embedding, decoder layers and head by rank", "megatron.env", read_units, write)
