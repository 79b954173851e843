"""`vllm`: decoder layers by pipeline rank, as environment variables.

`VLLM_PP_LAYER_PARTITION` gives the number of layers of each rank (vllm/distributed/utils.py, get_pp_indices); the
embedding is on the first rank, the last norm and the head are on the last. vLLM uses a share of each GPU's memory for
weights, activations and its cache.
"""

import numpy as np

from gdp.arrays import I64, Bool
from gdp.errors import InputError
from gdp.export.export_target import ExportTarget, gpu_numbers, gpus
from gdp.export.export_units import ExportUnits
from gdp.export.module_chains import find_layers
from gdp.export.refusals import check_inference
from gdp.simulator.problem import Problem

NAME = "vllm"
_VARIABLE = "VLLM_PP_LAYER_PARTITION"
_PORT = 8000  # of the first server, by default
_RESERVE = 0.08  # gpu_memory_utilization is 0.92 by default (vllm/config/cache.py; 0.9 in earlier versions)


def read_units(problem: Problem) -> ExportUnits:
    """Makes a unit of each decoder layer; ops before them go with the first, ops after them with the last.

    The layers of each replica follow those of the one before. InputError for a training step.
    """
    check_inference(problem, NAME)
    layers, replicas = find_layers(problem), problem.graph.replicas
    count = len(layers.names)
    positions = np.clip(layers.positions - 1, 0, count - 1) + count * replicas
    names = layers.names * (int(replicas.max()) + 1)
    return ExportUnits.chain(problem, positions, names, devices=gpus(problem, NAME))


def write(problem: Problem, units: ExportUnits, devices: I64) -> str:
    """Writes `VLLM_PP_LAYER_PARTITION=10,11,11` and the GPUs in the order of ranks; of replicas a command each."""
    memory = [problem.cluster.devices[device].memory_bytes for device in np.unique(devices)]
    share = float((problem.memory_limit_bytes[np.unique(devices)] / memory).max())
    servers = _servers(problem, units, devices)
    parts = []
    for number, ranks in enumerate(servers):
        sizes = [sum(len(units.members[unit]) for unit in np.flatnonzero(own)) for own in ranks.values()]
        command = f"vllm serve MODEL --pipeline-parallel-size {len(sizes)} --gpu-memory-utilization {share:.4g}"
        numbers = ",".join(str(gpu_numbers(problem)[device]) for device in ranks)
        variables = f"{_VARIABLE}={','.join(map(str, sizes))}", f"CUDA_VISIBLE_DEVICES={numbers}"
        if len(servers) == 1:
            return "\n".join((f"# {command}", *variables, ""))
        parts.append(f"{' '.join(variables)} {command} --port {_PORT + number}")
    return "\n".join((f"# {len(servers)} servers", *parts, ""))


def _servers(problem: Problem, units: ExportUnits, devices: I64) -> list[dict[int, Bool]]:
    """Returns the units [U] by device of each replica, in the order of ranks. InputError where two share a device."""
    replica = problem.graph.replicas[units.first_op]
    servers = [
        {
            int(device): (replica == own) & (devices == device)
            for device in dict.fromkeys(devices[replica == own].tolist())
        }
        for own in range(int(replica.max()) + 1)
    ]
    if sum(map(len, servers)) > len(np.unique(devices)):
        raise InputError(f"{NAME}: replicas are servers, and two of them share a device; place with fewer --batches")
    return servers


def notes(problem: Problem, units: ExportUnits, devices: I64) -> list[str]:
    """Returns a sentence on the servers of a plan of replicas."""
    servers, names = _servers(problem, units, devices), [device.name for device in problem.cluster.devices]
    each = [", ".join(names[device] for device in ranks) for ranks in servers]
    return [f"{len(each)} servers, a line of the file each: on {'; on '.join(each)}."] if len(each) > 1 else []


def _layers(units: ExportUnits) -> range:
    return range(0 if units.problem.graph.replicas.any() else units.num_units)


TARGET = ExportTarget(
    NAME,
    "whole decoder layers by rank",
    "vllm.env",
    read_units,
    write,
    reserve=_RESERVE,
    notes=notes,
    layers=_layers,
    takes_replicas=True,
)
