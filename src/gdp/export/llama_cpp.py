"""`llama-cpp`: options of llama.cpp that put its layers, its other tensors and its cache where a plan has them.

    -c 4096 -ngl 33 -dev CUDA0,CUDA1 -ts 20,13     the cache: tokens, layers on GPUs, GPUs in order, layers of each
    -ot '^blk\\.(0|1|2)\\.=CUDA0'                    tensors: the first pattern found in a GGUF tensor's name counts

llama.cpp computes an op where its weights are, and attention where the cache is. It has the cache of a layer where
`-ts` puts the layer, so each GPU has one stretch of layers, and the CPU the first. Units are whole layers, or with
`--split-layers` their attention and their feed-forward part; and the embedding, the last norm and the head."""

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from gdp.arrays import I64
from gdp.cluster.achieved import family_of
from gdp.errors import InputError, prefixed
from gdp.export.export_target import (
    ExportTarget,
    ExportUnits,
    cards_of,
    check_inference,
    check_one_batch,
    check_one_host,
    is_cpu,
)
from gdp.export.gguf_names import FEED_FORWARD, gguf_tensors, is_feed_forward
from gdp.export.llama_cpp_cache import Cache, find_cache
from gdp.export.module_chains import Layers, find_layers
from gdp.graph import Graph
from gdp.graph.layers import enclosing
from gdp.models.serving import ELEMENT_BYTES
from gdp.models.source import ModelSource
from gdp.placers.base import inherit
from gdp.simulator.problem import Problem

NAME = "llama-cpp"
_GIB = 2**30
_CACHE_TYPES = ("f32", "f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
_BACKENDS = {"amd": "ROCm", "apple": "MTL"}  # by family of cards (ggml-cuda.h, ggml-metal.cpp)


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """Options of llama.cpp: `context` in tokens (None: a default; 0: no room for a cache), and the size of a unit."""

    context: int | None = None
    split_layers: bool = False
    shares: tuple[int, ...] = ()  # of each GPU in all matrices; (): a layer is on one device
    served: tuple[str, ...] = ()  # options of the cache that is in the graph

    def __post_init__(self) -> None:
        if self.context is not None and self.context < 0:
            raise InputError(f"--ctx {self.context}: a number of tokens is expected; 0 leaves no room for a cache")

    def target(self) -> ExportTarget:
        """Returns the target of these options."""
        words = [] if self.context is None else ["--ctx", str(self.context)]
        return ExportTarget(
            NAME,
            "attention and feed-forward parts of layers" if self.split_layers else "whole layers",
            "override_tensor.txt",
            self.read_units,
            self.write,
            options=(*words, *(["--split-layers"] * self.split_layers)),
            with_room=self.with_room,
            arrange=in_stretches,
            layers=whole_layers,
            notes=self.notes,
            with_shares=lambda shares: replace(self, shares=shares).target(),
            with_model=self.of_model,
        )

    def of_model(self, source: ModelSource) -> ExportTarget:
        """Returns the target with the cache that a step of `source` has, as it is where MODEL is elsewhere now.
        InputError for a type that llama.cpp lacks."""
        try:
            served = source.served
        except InputError:
            served = None
        if served is None:
            return self.target()
        options = [f"-c {served.num_sequences * served.context}", f"-np {served.num_sequences}"]
        if (element_bytes := source.reading.serving.cache_element_bytes) is not None:
            kinds = [kind for kind in _CACHE_TYPES if ELEMENT_BYTES[kind] == element_bytes]
            if not kinds:
                raise InputError(
                    f"{NAME}: has no cache of {float(element_bytes):g} bytes an element; place with --kv-cache q8_0"
                )
            options.append(f"-ctk {kinds[0]} -ctv {kinds[0]}")
        return replace(self, served=tuple(options)).target()

    def read_units(self, problem: Problem) -> ExportUnits:
        """Makes the units of a Transformers decoder. InputError for other names, training and micro-batches."""
        check_inference(problem, NAME)
        check_one_batch(problem, NAME)
        check_one_host(problem, NAME)
        layers = find_layers(problem)
        unit_of = _unit_names(problem.graph, layers, split_layers=self.split_layers)
        numbers: dict[str, int] = {}
        labels = [numbers.setdefault(name, len(numbers)) if name else -1 for name in unit_of]
        return ExportUnits.build(problem, inherit(problem, labels), list(numbers))

    def cache(self, graph: Graph) -> Cache:
        """Returns the cache that llama.cpp will allocate. InputError where it is asked for and cannot be known."""
        return find_cache(graph, _tensors(graph), self.context)

    def with_room(self, problem: Problem) -> Problem:
        """Returns `problem` with llama.cpp's cache beside its layers."""
        return self.cache(problem.graph).beside(problem)

    def write(self, problem: Problem, units: ExportUnits, devices: I64) -> str:
        """Writes an option a line, for `xargs llama-server -m MODEL.gguf < FILE`."""
        names = _names(problem)
        place = {name: int(devices[unit]) for unit, members in enumerate(units.members) for name in members}
        cache = self.cache(problem.graph)
        lines = [f"-c {cache.tokens}"] if cache.tokens else [*self.served]
        if self.shares:
            backend = _BACKENDS.get(family_of(problem.cluster.devices[0].kind), "CUDA")
            gpus = ",".join(f"{backend}{number}" for _, number in cards_of(problem)[0])
            lines += ["-ngl 999", "-sm row", f"-dev {gpus}", f"-ts {','.join(map(str, self.shares))}"]
            return "\n".join(lines) + "\n"
        lines += _cache_options(problem, _layer_devices(place)) or ["-ngl 999"]
        parts: list[tuple[str, int]] = []  # (pattern, device)
        by_device: dict[tuple[str, int], list[int]] = defaultdict(list)
        for name, device in place.items():
            if not name.startswith("blk."):
                parts.append((rf"^{name}\.", device))
                continue
            _, number, *part = name.split(".")
            other = place.get(f"blk.{number}.ffn" if part == ["attn"] else f"blk.{number}.attn")
            is_whole = not part or other in (None, device)
            by_device["" if is_whole or part == ["attn"] else FEED_FORWARD, device].append(int(number))
        # the pattern of a feed-forward part is before that of all of its layer
        for (tensors, device), layers in sorted(by_device.items(), key=lambda item: (not item[0][0], min(item[1]))):
            joined = "|".join(map(str, sorted(set(layers))))
            lines.append(rf"-ot '^blk\.({joined})\.{tensors}={names[device]}'")
        lines += [f"-ot '{pattern}={names[device]}'" for pattern, device in parts]
        return "\n".join(lines) + "\n"

    def notes(self, problem: Problem, units: ExportUnits, devices: I64) -> list[str]:
        """Returns sentences on assumptions about llama.cpp, and on costs that the figures lack."""
        cache = self.cache(problem.graph)
        notes: list[str] = []
        if cache.is_in_graph and not self.served:
            notes = ["The graph has its cache of keys and values; start llama.cpp with a -c of the same size."]
        elif not cache.is_known:
            notes = [
                "No room is left for llama.cpp's cache, whose size cannot be read from this graph; use --reserve or "
                "--max-memory."
            ]
        elif cache.num_bytes:
            size = cache.num_bytes / _GIB
            notes = [
                f"Room is left for a cache of {cache.tokens:,} tokens in float16 beside its layers, {size:.3g} GiB in "
                "all; --ctx sets the tokens, of all sequences together. Compute buffers are not counted (--reserve)."
            ]
        elif not cache.is_in_graph:
            notes = ["No room is left for a cache of keys and values."]
        if self.shares:
            notes.append("Rows of matrices have these shares; the cache and attention are on the first GPU (-mg).")
            return notes
        place = {name: int(devices[unit]) for unit, members in enumerate(units.members) for name in members}
        if _cache_options(problem, _layer_devices(place)) is None:
            notes.append(
                "The layers of a device are not one stretch, so llama.cpp divides its cache over the GPUs in its own "
                "way, and not beside these layers."
            )
        split = [
            name
            for name in place
            if name.endswith(".ffn") and place[name] != place.get(f"{name[:-4]}.attn", place[name])
        ]
        if split:
            notes.append(
                f"Split over devices: {', '.join(name[:-4] for name in split)}. llama.cpp cuts its graph there, which "
                "the figure lacks."
            )
        return notes


def in_stretches(problem: Problem, units: ExportUnits, devices: I64) -> I64:
    """[U] Gives each device as many layers as in `devices` [U], in one stretch: CPUs first, then GPUs as they come. A
    layer in parts is where its attention is; all of it moves."""
    layers = _layer_parts(units)
    if not layers or len({len(parts) for parts in layers}) > 1:
        return devices  # layers that share weights, or lack a part
    here = devices[[parts[0] for parts in layers]]
    cpus = is_cpu(problem)
    rank = {device: (not cpus[device], np.flatnonzero(here == device).mean()) for device in set(here.tolist())}
    arranged = devices.copy()
    for parts, source in zip(layers, sorted(layers, key=lambda parts: rank[int(devices[parts[0]])]), strict=True):
        arranged[parts] = devices[source]
    return arranged


def _layer_parts(units: ExportUnits) -> list[list[int]]:
    """Returns the units of each layer in order, attention before feed-forward; [] where a unit has several layers."""
    layers: dict[int, list[int]] = defaultdict(list)
    for unit, members in sorted(enumerate(units.members), key=lambda item: item[1]):
        numbers = [int(name.split(".")[1]) for name in members if name.startswith("blk.")]
        if len(numbers) > 1:
            return []
        if numbers:
            layers[numbers[0]].append(unit)
    return [layers[number] for number in sorted(layers)]


def whole_layers(units: ExportUnits) -> list[int]:
    """Returns the units that are layers, in order; [] where layers are in parts, or share weights."""
    layers = _layer_parts(units)
    return [parts[0] for parts in layers] if all(len(parts) == 1 for parts in layers) else []


def _tensors(graph: Graph) -> dict[str, str]:
    parameters = [name for name, kind in zip(graph.op_names, graph.kinds, strict=True) if kind == "parameter"]
    with prefixed(f"graph {graph.name!r}"):
        return gguf_tensors(parameters)


def _unit_names(graph: Graph, layers: Layers, *, split_layers: bool) -> list[str]:
    """[N] Returns `blk.3`, `blk.3.attn`, `output`; "" for ops that go with their inputs."""
    tensors = _tensors(graph)
    names = [""] * graph.num_ops
    inside: dict[str, set[str]] = defaultdict(set)  # units of the parameters in each module
    for op, (name, module) in enumerate(zip(graph.op_names, graph.modules, strict=True)):
        tensor = tensors.get(name)
        if tensor is None:
            continue
        names[op] = tensor
        if tensor.startswith("blk."):
            part = f".{'ffn' if is_feed_forward(tensor) else 'attn'}" if split_layers else ""
            names[op] = ".".join(tensor.split(".", 2)[:2]) + part
        for path in enclosing(module):
            inside[path].add(names[op])
    for op, module in enumerate(graph.modules):
        if names[op]:
            continue
        layer = module.removeprefix(f"{layers.path}.").partition(".")[0] if module.startswith(f"{layers.path}.") else ""
        if layer and not split_layers:
            names[op] = f"blk.{layer}"
            continue
        units = next((inside[path] for path in reversed(list(enclosing(module))) if path in inside), set())
        if len(units) == 1:
            (names[op],) = units
    for tensor, consumer in zip(graph.edge_tensors.tolist(), graph.consumers.tolist(), strict=True):
        producer = int(graph.producers[tensor])
        if not names[consumer] and graph.kinds[producer] == "parameter":
            names[consumer] = names[producer]  # a head that shares the embedding, which llama.cpp computes there
    return names


def _layer_devices(place: dict[str, int]) -> list[int]:
    """Returns the device of each layer's attention, in the order of layers."""
    attention = re.compile(r"blk\.(\d+)(\.attn)?$")
    layers = {int(match[1]): place[name] for name in place if (match := attention.match(name))}
    return [layers[number] for number in sorted(layers)]


def _cache_options(problem: Problem, layer_devices: list[int]) -> list[str] | None:
    """Returns the options that put the cache beside its layers, None where there are none. llama.cpp gives the first
    layers to the CPU, the last `-ngl` (and the head, which counts as a layer) to the GPUs of `-dev`, in stretches of
    the sizes of `-ts` (llama-model.cpp, load_tensors)."""
    names, cpus = _names(problem), is_cpu(problem)
    runs = [(device, len(list(layers))) for device, layers in groupby(layer_devices)]
    gpus = [device for device, _ in runs if not cpus[device]]
    num_on_cpu = runs[0][1] if cpus[runs[0][0]] else 0
    if len(set(gpus)) < len(gpus) or any(cpus[device] for device, _ in runs[1:]):
        return None
    if not gpus:
        return ["-ngl 0"]
    sizes = [size for device, size in runs if not cpus[device]]
    sizes[-1] += 1
    others = [device for device in np.flatnonzero(~cpus).tolist() if device not in gpus]  # for other tensors
    return [
        f"-ngl {len(layer_devices) + 1 - num_on_cpu}",
        f"-dev {','.join(names[device] for device in [*gpus, *others])}",
        f"-ts {','.join(map(str, [*sizes, *[0] * len(others)]))}",
    ]


def _names(problem: Problem) -> list[str]:
    """[D] Returns the names of devices in llama.cpp, each of whose backends numbers its own."""
    backends = [
        "CPU" if device.is_cpu else _BACKENDS.get(family_of(device.kind), "CUDA") for device in problem.cluster.devices
    ]
    return [
        backend if backend == "CPU" else f"{backend}{backends[:device].count(backend)}"
        for device, backend in enumerate(backends)
    ]


TARGET = LlamaCpp().target()
