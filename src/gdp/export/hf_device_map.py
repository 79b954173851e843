"""`hf-device-map`: the `device_map` of Transformers and accelerate, JSON from module paths to GPU numbers or "cpu".

`accelerate.dispatch_model` hooks every module that has an entry: its parameters go to the entry's device, its inputs
are moved there, and all inside it runs there. The first entry is the device that takes the model's inputs
(`main_device`). Next to GPUs accelerate computes nothing on a CPU: it only keeps weights there, of modules that do not
fit (`offload.py`). A CPU alone is used like a GPU.
"""

import json

import numpy as np

from gdp.errors import InputError
from gdp.export.checks import check_one_batch
from gdp.export.modules import enclosing, module_units
from gdp.export.offload import offload
from gdp.export.target import Target, accelerator_numbers, wrong_content
from gdp.export.units import Units, is_cpu
from gdp.graph import I64, Bool
from gdp.problem import Problem
from gdp.simulate import Simulation

NAME = "hf-device-map"


def read_units(problem: Problem) -> Units:
    """The units of `module_units` on the GPUs, or on the first CPU where there are no GPUs. InputError for
    micro-batches."""
    check_one_batch(problem, NAME)
    return module_units(problem, devices=_usable(problem))


def _usable(problem: Problem) -> Bool:
    cpus = is_cpu(problem)
    if not cpus.all():
        return np.asarray(~cpus)
    return np.asarray(np.arange(problem.num_devices) == 0)


def device_map(problem: Problem, units: Units, devices: I64) -> dict[str, int | str]:
    """The smallest device map with these devices [U]: a module has an entry where all in it is on one device and around
    it not. The device of the inputs comes first."""
    graph, placement = problem.graph, units.place(devices)
    found: dict[str, set[int]] = {"": set()}
    for module, device, phase in zip(graph.modules, placement.tolist(), graph.phases, strict=True):
        if phase in ("forward", ""):
            for path in ("", *enclosing(module)):
                found.setdefault(path, set()).add(device)
    roots = {path for members in units.members for path in members if path in found}
    held = {path for root in roots for path in ("", *enclosing(root))}
    numbers = accelerator_numbers(problem)
    entries: dict[str, int | str] = {}
    for path in sorted(held, key=lambda path: (path.count(".") + bool(path), path)):
        if "" in entries or any(outer in entries for outer in enclosing(path)):
            continue
        if len(found[path]) == 1:
            (device,) = found[path]
            entries[path] = "cpu" if numbers[device] < 0 else numbers[device]
        elif path in roots:
            raise InputError(f"graph {graph.name!r}: module {path!r} is split over devices; this is a fault of gdp")
    first = numbers[int(placement[_first_input(problem)])]
    main = "cpu" if first < 0 else first
    order = {path: number for number, path in enumerate(dict.fromkeys(graph.modules))}
    in_order = sorted(entries, key=lambda path: min((order[m] for m in order if _is_in(m, path)), default=0))
    return {path: entries[path] for path in sorted(in_order, key=lambda path: entries[path] != main)}


def write(problem: Problem, units: Units, devices: I64) -> str:
    """The device map as JSON."""
    return json.dumps(device_map(problem, units, devices), indent=2) + "\n"


def parse(text: str, problem: Problem, units: Units) -> I64:
    """[U] from a device map: the entry of the module, or of one around it."""
    content = json.loads(text)
    by_number = {number: device for device, number in enumerate(accelerator_numbers(problem)) if number >= 0}
    by_number["cpu"] = int(np.argmax(is_cpu(problem)))  # type: ignore[index]
    devices = np.empty(units.num_units, np.int64)
    for unit, members in enumerate(units.members):
        entries = {content[path] for root in members for path in ("", *enclosing(root)) if path in content}
        if len(entries) != 1:
            raise wrong_content(NAME, f"{members[0]!r} has {len(entries)} devices")
        devices[unit] = by_number[entries.pop()]
    return devices


def _first_input(problem: Problem) -> int:
    kinds = problem.graph.kinds
    return next((op for op, kind in enumerate(kinds) if kind == "input"), 0)


def _is_in(module: str, path: str) -> bool:
    return not path or module == path or module.startswith(f"{path}.")


def offloaded(problem: Problem, units: Units, devices: I64) -> tuple[I64, Simulation] | None:
    """As `offload.offload`, with the maps written here."""
    return offload(problem, units, devices, device_map)


TARGET = Target(NAME, "module level", "device_map.json", read_units, write, parse, offloaded)
