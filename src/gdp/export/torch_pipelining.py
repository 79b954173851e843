"""`torch-pipelining`: split points for `torch.distributed.pipelining`, JSON.

    split_spec = {path: SplitPoint[point] for path, point in stages["split_spec"].items()}
    pipe = pipeline(module, mb_args, split_spec=split_spec)

gives as many stages as the file has devices, and stage k goes to `devices[k]`. A stage begins where the forward pass
calls a module, so stages are contiguous in the order of execution."""

import json

from gdp.arrays import I64
from gdp.export.export_target import ExportTarget, ExportUnits, stage_starts
from gdp.export.module_chains import begins
from gdp.simulator.problem import Problem

NAME = "torch-pipelining"


def read_units(problem: Problem) -> ExportUnits:
    """Makes a unit from each module that may begin a stage to the next."""
    positions, names = begins(problem)
    return ExportUnits.chain(problem, positions, names)


def write(problem: Problem, units: ExportUnits, devices: I64) -> str:
    """Writes split points and the device of each stage as JSON."""
    starts = stage_starts(devices)
    names = [problem.cluster.devices[device].name for device in devices[starts].tolist()]
    points = {units.members[unit][0]: "BEGINNING" for unit in starts[1:]}
    return json.dumps({"split_spec": points, "devices": names}, indent=2) + "\n"


TARGET = ExportTarget(NAME, "contiguous stages of modules", "stages.json", read_units, write)
