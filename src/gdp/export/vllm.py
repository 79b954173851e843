"""`vllm`: decoder layers by pipeline rank, as environment variables.

`VLLM_PP_LAYER_PARTITION` gives the number of layers of each rank (vllm/distributed/utils.py, get_pp_indices); the
embedding is on the first rank, the last norm and the head are on the last. vLLM uses a share of each GPU's memory for
weights, activations and its cache.
"""

import numpy as np

from gdp.arrays import I64
from gdp.export.export_target import ExportTarget, gpus, stage_members, write_ranks
from gdp.export.export_units import ExportUnits
from gdp.export.module_chains import find_layers
from gdp.export.refusals import check_inference
from gdp.simulator.problem import Problem

NAME = "vllm"
_VARIABLE = "VLLM_PP_LAYER_PARTITION"
_RESERVE = 0.08  # gpu_memory_utilization is 0.92 by default (vllm/config/cache.py; 0.9 in earlier versions)


def read_units(problem: Problem) -> ExportUnits:
    """Makes a unit of each decoder layer; ops before them go with the first, ops after them with the last.

    InputError for a training step.
    """
    check_inference(problem, NAME)
    layers = find_layers(problem)
    positions = np.clip(layers.positions - 1, 0, len(layers.names) - 1)
    return ExportUnits.chain(problem, positions, layers.names, devices=gpus(problem, NAME))


def write(problem: Problem, units: ExportUnits, devices: I64) -> str:
    """Writes `VLLM_PP_LAYER_PARTITION=10,11,11` and the GPUs in the order of ranks."""
    sizes = list(map(len, stage_members(units, devices)))
    memory = [problem.cluster.devices[device].memory_bytes for device in np.unique(devices)]
    share = float((problem.memory_limit_bytes[np.unique(devices)] / memory).max())
    command = f"vllm serve MODEL --pipeline-parallel-size {len(sizes)} --gpu-memory-utilization {share:.4g}"
    return write_ranks(problem, devices, command, f"{_VARIABLE}={','.join(map(str, sizes))}")


TARGET = ExportTarget(
    NAME,
    "whole decoder layers by rank",
    "vllm.env",
    read_units,
    write,
    reserve=_RESERVE,
    layers=lambda units: range(units.num_units),
)
