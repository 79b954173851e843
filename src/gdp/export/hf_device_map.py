"""`hf-device-map`: the `device_map` of Transformers and accelerate, JSON from module paths to GPU numbers or "cpu".
`accelerate.dispatch_model` hooks every module that has an entry: its parameters go to the entry's device, its inputs
are moved there, and all inside it runs there. The first entry is the device that takes the model's inputs
(`main_device`). Next to GPUs accelerate computes nothing on a CPU: it only keeps weights there, of modules that do not
fit (`offload`) and compute on `main_device`, by default the GPU of the lowest number. A CPU alone is used like a
GPU."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

import numpy as np

from gdp.arrays import I64
from gdp.errors import InputError
from gdp.export.accelerate_maps import fetching_late, placement_of
from gdp.export.export_target import ExportTarget, ExportUnits, check_one_batch, check_one_host, gpu_numbers, is_cpu
from gdp.export.modules import STATE_KINDS, first_input, is_inside, module_units
from gdp.graph.layers import enclosing
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import Simulation, simulate

NAME = "hf-device-map"


def read_units(problem: Problem) -> ExportUnits:
    """Makes the units of `module_units` on the GPUs, else on the first CPU. InputError for micro-batches."""
    check_one_batch(problem, NAME)
    check_one_host(problem, NAME)
    cpus = is_cpu(problem)
    return module_units(problem, devices=np.arange(problem.num_devices) == 0 if cpus.all() else ~cpus)


def device_map(problem: Problem, units: ExportUnits, devices: I64) -> dict[str, int | str]:
    """Returns the smallest device map with these devices [U]. A module has an entry if all in it is on one device and
    no module around it is, and so has a container's own tensor. `main_device` is first."""
    graph, placement = problem.graph, units.place(devices)
    members = set(chain.from_iterable(units.members))
    devices_in: dict[str, set[int]] = {"": set()}
    own_tensors = set[str]()
    for name, kind, module, device, phase in zip(
        graph.op_names, graph.kinds, graph.modules, placement.tolist(), graph.phases, strict=True
    ):
        if phase in ("forward", ""):
            is_own = kind in STATE_KINDS and name in members
            own_tensors.update([name] * is_own)
            for path in ("", *enclosing(name if is_own else module)):
                devices_in.setdefault(path, set()).add(device)
    roots = members & devices_in.keys()
    held = {path for root in roots for path in ("", *enclosing(root))}
    names: list[int | str] = ["cpu" if number < 0 else number for number in gpu_numbers(problem)]
    main = names[int(placement[first_input(graph)])]
    if "cpu" in (used := [names[device] for device in sorted(devices_in[""])]):
        main = next((name for name in used if name != "cpu"), "cpu")
    entries: dict[str, int | str] = {}
    for path in sorted(held, key=lambda path: (path.count(".") + bool(path), path)):
        if "" in entries or any(outer in entries for outer in enclosing(path)):
            continue
        if len(devices_in[path]) == 1:
            (device,) = devices_in[path]
            # a container's hook fetches nothing from the CPU: its own tensors stay where offloaded modules compute
            entries[path] = main if path in own_tensors and names[device] == "cpu" else names[device]
        elif path in roots:
            raise InputError(f"graph {graph.name!r}: module {path!r} is split over devices; this is a fault of gdp")
    modules = list(dict.fromkeys(graph.modules))

    def rank(path: str) -> tuple[bool, int]:
        return entries[path] != main, next((n for n, module in enumerate(modules) if is_inside(module, path)), 0)

    return {path: entries[path] for path in sorted(entries, key=rank)}


def write(problem: Problem, units: ExportUnits, devices: I64) -> str:
    """Writes the device map as JSON."""
    return json.dumps(device_map(problem, units, devices), indent=2) + "\n"


def notes(problem: Problem, units: ExportUnits, devices: I64) -> list[str]:
    """Returns a sentence on tensors that `dispatch_model` does not move."""
    graph, entries = problem.graph, device_map(problem, units, devices)
    rows = zip(graph.op_names, graph.kinds, graph.modules, strict=True)
    state = {name for name, kind, module in rows if module and kind in STATE_KINDS}
    left = ", ".join(path for path in entries if path in state)
    if not left:
        return []
    return [
        f"Tensors of modules without an entry: {left}. from_pretrained and load_checkpoint_and_dispatch load them "
        "where the map says; dispatch_model leaves them where they are, so move them first."
    ]


_MAX_STEPS = 9  # of a bisection

Offloaded = tuple[I64, Simulation]  # the devices [U] of units, and the step as accelerate runs it


def offload(problem: Problem, units: ExportUnits, devices: I64) -> Offloaded | None:
    """Moves units from their GPUs ([U] `devices`) to the CPU until the step fits, and returns the fastest such step. If
    nothing else fits, all units are on the CPU, which then computes. None without a CPU beside GPUs, in training, and
    if even that does not fit. The unit that takes the step's inputs is on a GPU, on which offloaded modules compute:
    its own, or any other if the step does not fit so."""
    cpus = is_cpu(problem)
    if cpus.all() or not cpus.any() or "update" in problem.graph.phases:
        return None
    host = int(np.argmax(cpus))
    resident_bytes = np.zeros(units.num_units, np.int64)
    np.add.at(resident_bytes, units.index, problem.graph.resident_bytes)
    first = units.index[first_input(problem.graph)]
    candidates = np.flatnonzero((resident_bytes > 0) & (np.arange(units.num_units) != first))
    by_size = candidates[np.argsort(resident_bytes[candidates], kind="stable")]
    orders = candidates[::-1], by_size[::-1], by_size  # the last units first, as accelerate does; largest; smallest

    def run(moved: I64) -> Offloaded | None:
        placement = placement_of(problem, device_map(problem, units, moved))
        if placement is None:
            return None
        fetched, where = fetching_late(problem, placement) or (problem, placement)
        program = [np.flatnonzero(where == device) for device in range(problem.num_devices)]  # as hooks run it
        simulation = simulate(fetched, where, order=program)
        return (moved, simulation) if simulation.feasible else None

    def run_with(main: int, offloaded: I64) -> Offloaded | None:
        moved = devices.copy()
        moved[first] = main
        moved[offloaded] = host
        return run(moved)

    for main in dict.fromkeys([int(devices[first]), *np.flatnonzero(~cpus).tolist()]):
        steps = [step for order in orders for step in _fewest(order, partial(run_with, main))]
        if steps:
            return min(steps, key=lambda step: step[1].step_time_ns)
    return run(np.full(units.num_units, host))


def _fewest(order: I64, run: Callable[[I64], Offloaded | None]) -> Iterator[Offloaded]:
    """Finds by bisection how many of `order` are enough, and yields all steps that fit."""
    low, high, count = 0, len(order), len(order)
    for _ in range(_MAX_STEPS):
        step = run(order[:count])
        if step is not None:
            yield step
            high = count
        elif count == len(order):
            return
        else:
            low = count
        if high - low <= 1:
            return
        count = (low + high) // 2


TARGET = ExportTarget(NAME, "module level", "device_map.json", read_units, write, offload, notes=notes)
