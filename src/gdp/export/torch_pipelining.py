"""`torch-pipelining`: split points for `torch.distributed.pipelining`, JSON.

    split_spec = {path: SplitPoint[point] for path, point in stages["split_spec"].items()}
    pipe = pipeline(module, mb_args, split_spec=split_spec)

gives as many stages as the file has devices, and stage k goes to `devices[k]`. A stage begins where the forward pass
calls a module, so stages are contiguous in the order of execution.
"""

import json

import numpy as np

from gdp.export.chains import begins
from gdp.export.target import Target, stage_devices, stage_starts, wrong_content
from gdp.export.units import Units
from gdp.graph import I64
from gdp.problem import Problem

NAME = "torch-pipelining"


def read_units(problem: Problem) -> Units:
    """A unit from each module that may begin a stage to the next."""
    positions, names = begins(problem)
    return Units.chain(problem, positions, names)


def write(problem: Problem, units: Units, devices: I64) -> str:
    """Split points and the device of each stage as JSON."""
    names = [problem.cluster.devices[device].name for device in stage_devices(devices)]
    points = {units.members[unit][0]: "BEGINNING" for unit in stage_starts(devices)[1:]}
    return json.dumps({"split_spec": points, "devices": names}, indent=2) + "\n"


def parse(text: str, problem: Problem, units: Units) -> I64:
    """[U] from such a file."""
    content = json.loads(text)
    unit_of = {members[0]: unit for unit, members in enumerate(units.members)}
    if any(path not in unit_of for path in content["split_spec"]):
        raise wrong_content(NAME, "a split point is no module that begins a unit of this graph")
    cuts = sorted(unit_of[path] for path in content["split_spec"])
    numbers = [problem.cluster.device_number(name) for name in content["devices"]]
    return np.array(numbers, np.int64)[np.searchsorted(cuts, np.arange(units.num_units), side="right")]


TARGET = Target(NAME, "contiguous stages of modules", "stages.json", read_units, write, parse)
