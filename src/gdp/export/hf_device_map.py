"""`hf-device-map`: the `device_map` of Transformers and accelerate, JSON from module paths to GPU numbers or "cpu".

`accelerate.dispatch_model` hooks every module that has an entry: its parameters go to the entry's device, its inputs
are moved there, and all inside it runs there. The first entry is the device that takes the model's inputs
(`main_device`). Next to GPUs accelerate computes nothing on a CPU: it only keeps weights there, of modules that do not
fit (`offload.py`). A CPU alone is used like a GPU.
"""

import json

import numpy as np

from gdp.arrays import I64
from gdp.errors import InputError
from gdp.export.checks import check_one_batch
from gdp.export.devices import gpu_numbers, is_cpu
from gdp.export.modules import enclosing, first_input, is_inside, module_units
from gdp.export.offload import offload
from gdp.export.target import ExportTarget, wrong_content
from gdp.export.units import ExportUnits
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import Simulation

NAME = "hf-device-map"


def read_units(problem: Problem) -> ExportUnits:
    """Makes the units of `module_units` on the GPUs, or on the first CPU where there are no GPUs.

    InputError for micro-batches.
    """
    check_one_batch(problem, NAME)
    cpus = is_cpu(problem)
    return module_units(problem, devices=np.arange(problem.num_devices) == 0 if cpus.all() else ~cpus)


def device_map(problem: Problem, units: ExportUnits, devices: I64) -> dict[str, int | str]:
    """Returns the smallest device map with these devices [U].

    A module has an entry if all in it is on one device and no module around it is. The device of the inputs is first.
    """
    graph, placement = problem.graph, units.place(devices)
    devices_in: dict[str, set[int]] = {"": set()}
    for module, device, phase in zip(graph.modules, placement.tolist(), graph.phases, strict=True):
        if phase in ("forward", ""):
            for path in ("", *enclosing(module)):
                devices_in.setdefault(path, set()).add(device)
    roots = {path for members in units.members for path in members if path in devices_in}
    held = {path for root in roots for path in ("", *enclosing(root))}
    names: list[int | str] = ["cpu" if number < 0 else number for number in gpu_numbers(problem)]
    entries: dict[str, int | str] = {}
    for path in sorted(held, key=lambda path: (path.count(".") + bool(path), path)):
        if "" in entries or any(outer in entries for outer in enclosing(path)):
            continue
        if len(devices_in[path]) == 1:
            (device,) = devices_in[path]
            entries[path] = names[device]
        elif path in roots:
            raise InputError(f"graph {graph.name!r}: module {path!r} is split over devices; this is a fault of gdp")
    main = names[int(placement[first_input(graph)])]
    modules = list(dict.fromkeys(graph.modules))

    def rank(path: str) -> tuple[bool, int]:
        return entries[path] != main, next((n for n, module in enumerate(modules) if is_inside(module, path)), 0)

    return {path: entries[path] for path in sorted(entries, key=rank)}


def write(problem: Problem, units: ExportUnits, devices: I64) -> str:
    """Writes the device map as JSON."""
    return json.dumps(device_map(problem, units, devices), indent=2) + "\n"


def parse(text: str, problem: Problem, units: ExportUnits) -> I64:
    """[U] Inverts `write`: a unit is on the device of its entry, or of the entry around it."""
    content = json.loads(text)
    by_name: dict[int | str, int] = {number: device for device, number in enumerate(gpu_numbers(problem))}
    by_name["cpu"] = int(np.argmax(is_cpu(problem)))
    devices = np.empty(units.num_units, np.int64)
    for unit, members in enumerate(units.members):
        entries = {content[path] for root in members for path in ("", *enclosing(root)) if path in content}
        if len(entries) != 1:
            raise wrong_content(NAME, f"{members[0]!r} has {len(entries)} devices")
        devices[unit] = by_name[entries.pop()]
    return devices


def offloaded(problem: Problem, units: ExportUnits, devices: I64) -> tuple[I64, Simulation] | None:
    """Calls `offload.offload` with the maps of `device_map`."""
    return offload(problem, units, devices, device_map)


TARGET = ExportTarget(NAME, "module level", "device_map.json", read_units, write, parse, offloaded)
