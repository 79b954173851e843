"""Device maps of Hugging Face's accelerate, asked of the library itself, as placements. `device_map="auto"` (or
`"balanced"`), `"balanced_low_0"` and `"sequential"` fill GPUs by the size of weights alone, then the CPU. A module on
the CPU keeps its weights there and computes on the main GPU: the parameter op is on the CPU, its consumers are on the
GPU, and the weights are transferred in each step. N ops, D devices."""

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from gdp.errors import InputError
from gdp.export.export_target import grouped_ops, is_cpu
from gdp.export.modules import STATE_KINDS
from gdp.graph.builder import GraphBuilder
from gdp.graph.layers import enclosing
from gdp.models.source import ModelSource
from gdp.models.stored_weights import stored_weights
from gdp.search.candidate import Figures
from gdp.simulator.problem import Placement, Problem
from gdp.simulator.simulate import Simulation, simulate

if TYPE_CHECKING:
    from torch import nn

DeviceMap = Mapping[str, int | str]  # from paths of modules or parameters to GPU numbers, "cpu" or "disk"

MODES = ("auto", "balanced", "balanced_low_0", "sequential")
PREFIX = "accelerate-"
NAMES = tuple(f"{PREFIX}{mode}" for mode in MODES)
SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)  # of GPUs' memory that maps may fill with weights


def module_of(source: ModelSource) -> "nn.Module":
    """Builds the module of MODEL with fake tensors, so nothing is allocated. InputError for a MODEL that is no PyTorch
    model, and if accelerate is not installed."""
    if find_spec("accelerate") is None:
        raise InputError(
            "accelerate is not installed, so its device maps are not known; pip install 'gdp-placement[hf]'"
        )
    from torch import nn

    from gdp.models.pytorch.capture_step import Built

    module = Built.by(source.build, source.text).answer[0]
    if not isinstance(module, nn.Module):
        raise InputError(f"{source.text}: is a training step of your own; accelerate maps modules, name the module")
    return module


def device_map(module: "nn.Module", problem: Problem, mode: str, share: float = 1.0) -> dict[str, int | str] | None:
    """Asks accelerate for a map of `module` in the limits, of which GPUs give a `share`. None: it has no answer."""
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    limits, cpus = problem.memory_limit_bytes, is_cpu(problem)
    max_memory: dict[int | str, int] = {n: int(share * limit) for n, limit in enumerate(limits[~cpus].tolist())}
    max_memory["cpu"] = sum(limits[cpus].tolist())
    classes = sorted(getattr(module, "_no_split_modules", None) or ())
    dtypes = _stored_dtypes(module)
    with _quiet():
        if mode != "sequential":
            max_memory = get_balanced_memory(
                module,
                max_memory,
                no_split_module_classes=classes,
                special_dtypes=dtypes,
                low_zero=mode == "balanced_low_0",
            )
        try:
            return dict(
                infer_auto_device_map(
                    module, max_memory=max_memory, no_split_module_classes=classes, special_dtypes=dtypes
                )
            )
        except ValueError:  # a module that fits nowhere
            return None


def _stored_dtypes(module: "nn.Module") -> dict[str, Any]:
    """Returns accelerate's types for quantised weights, as Transformers names them to it: of 4 or of 8 bits."""
    import torch
    from accelerate.utils import CustomDtype

    stored, dtypes = stored_weights(module), {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in stored:
            bits = 8 * stored[name].num_bytes / parameter.numel()
            if bits <= 12:
                dtypes[name] = torch.int8 if bits > 6 else CustomDtype.INT4
    return dtypes


def placement_of(problem: Problem, entries: DeviceMap) -> Placement | None:
    """[N] Returns the devices on which ops run under a device map. A module runs on the device of its entry or of the
    entry around it; if that is the CPU, on the lowest GPU of the map. An op of a module without an entry runs where its
    latest input was made. None if the map needs a CPU that is not there, or trains weights away from their use."""
    graph = problem.graph
    cpus = is_cpu(problem)
    gpus = np.flatnonzero(~cpus).tolist()
    host = int(np.argmax(cpus)) if cpus.any() else None
    devices: dict[str, int] = {}
    for path, where in entries.items():
        device = host if isinstance(where, str) else gpus[where]
        if device is None:
            return None
        devices[path] = device
    used = [device for device in devices.values() if device != host]
    main = next(iter(used if len(used) == len(devices) else sorted(used)), host)
    assert main is not None, "a device map has an entry"
    latest: list[int] = [-1] * graph.num_ops  # of the ops whose results each op reads
    for producer, consumer in zip(graph.producers[graph.edge_tensors].tolist(), graph.consumers.tolist(), strict=True):
        if graph.kinds[producer] not in STATE_KINDS:
            latest[consumer] = max(latest[consumer], producer)
    placement = np.empty(graph.num_ops, np.int64)
    for op, (name, kind, module) in enumerate(zip(graph.op_names, graph.kinds, graph.modules, strict=True)):
        entry = _entry(devices, name if kind in STATE_KINDS else module)
        if entry is None:
            placement[op] = placement[latest[op]] if latest[op] >= 0 else main
        elif entry == host and kind != "parameter":
            placement[op] = main  # offloaded modules keep their buffers where they compute
        else:
            placement[op] = entry
    for ops in grouped_ops(problem):
        placement[ops] = placement[ops[0]]
    trains = "update" in graph.phases
    if (trains and host is not None and main != host and (placement == host).any()) or problem.broken_constraints(
        placement
    ):
        return None
    return placement


def best_step(module: "nn.Module", problem: Problem, mode: str) -> Simulation | None:
    """Returns the fastest step that fits of a mode's maps, whose user tries several limits (`SHARES`). If no step fits,
    the one nearest to fitting; None if there is none. Weights on the CPU are fetched in the better of two ways: at
    once, or late (`fetching_late`), as accelerate does."""
    steps: list[Simulation] = []
    maps: list[dict[str, int | str]] = []
    for share in SHARES:
        entries = device_map(module, problem, mode, share)
        if entries is None or entries in maps:
            continue
        maps.append(entries)
        placement = placement_of(problem, entries)
        if placement is not None:
            steps.append(simulate(problem, placement))
            late = fetching_late(problem, placement)
            if late is not None:
                steps.append(simulate(*late))
    return min(steps, key=Figures.of, default=None)


def fetching_late(problem: Problem, placement: Placement) -> tuple[Problem, Placement] | None:
    """Returns a step that sends each weight on the CPU when the op before its first use elsewhere has ended. So do
    accelerate's hooks. It is the same step with its ops in another order and zero-byte tensors from those ops to the
    weights. None if no weight on the CPU is used elsewhere."""
    graph = problem.graph
    cpus = is_cpu(problem)
    is_state = graph.is_of_kind("parameter")
    first = np.full(graph.num_ops, graph.num_ops, np.int64)
    sources, targets = graph.producers[graph.edge_tensors], graph.consumers
    is_fetch = is_state[sources] & cpus[placement[sources]] & ~cpus[placement[targets]]
    np.minimum.at(first, sources[is_fetch], targets[is_fetch])
    fetched = np.flatnonzero(first < graph.num_ops)
    if not len(fetched):
        return None
    computes = np.flatnonzero(~is_state & ~cpus[placement])
    rank = np.arange(graph.num_ops, dtype=np.float64)
    rank[fetched] = first[fetched] - 0.5  # just before its first reader
    old = np.argsort(rank, kind="stable")
    place = np.searchsorted(computes, first[fetched]) - 1  # of the op before
    builder = GraphBuilder.of(graph)
    builder.add_edges(builder.add_tensors(computes[place[place >= 0]], 0), fetched[place >= 0])
    changed = replace(
        problem,
        graph=builder.build(graph.name, np.argsort(old)),
        op_time_ns=problem.op_time_ns[old],
        host_time_ns=problem.host_time_ns[old],
        allowed=problem.allowed[old],
        microbatch=problem.microbatch[old],
    )
    return changed, placement[old]


def _entry(devices: Mapping[str, int], path: str) -> int | None:
    """Returns the device of the innermost entry around `path`."""
    return next((devices[outer] for outer in reversed(["", *enclosing(path)]) if outer in devices), None)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences accelerate, which logs its decisions."""
    logger = logging.getLogger("accelerate.utils.modeling")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.setLevel(level)
