"""Classes of kernels on processor cores: what share of the peak rate or the bandwidth each of them reaches. A step of a
model with layers of all classes is run on all cores at once. An op takes its kernels' time at the figures of the
device, divided by the share of their class: the median over ops and sizes, in the caches and out of them, each counted
by its modelled time: other programs do not change that. Ops of one class tell its share first, then those of several
what they have besides."""

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from gdp.arrays import I64
from gdp.cluster import Device
from gdp.costs.kernels import CLASSES, kernels_of
from gdp.costs.rates import kernel_times
from gdp.costs.table import rule_of
from gdp.execute.calibrate.work import Extent, Log
from gdp.execute.measurement import PlacedProgram, measure_programs
from gdp.execute.targets import Target
from gdp.graph import Graph
from gdp.models.pytorch import capture

_WORDS, _NUM_LOGITS, _STEPS = 10_000, 1_000, 5
_LEAST = 0.1  # of an op's time, that kernels of a class have which others leave less
_NO_LAUNCHES = 3  # ops that take as many launches or fewer tell nothing of rates


class Probe(nn.Module):
    """Layers of all classes of kernels, one after the other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 4, 4)
        self.dense, self.small = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 1)
        self.grouped = nn.Conv2d(width, width, 3, padding=1, groups=4)
        self.depthwise = nn.ModuleList(nn.Conv2d(width, width, k, padding=k // 2, groups=width) for k in (3, 5, 7))
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.LayerNorm(width)])
        self.words, self.wide = nn.Embedding(_WORDS, width), nn.Linear(width, 3 * width)
        self.head = nn.Linear(2 * width, _NUM_LOGITS)

    def forward(self, images: Tensor, words: Tensor) -> Tensor:
        x = self.grouped(functional.gelu(self.dense(self.first(images))))
        for layer in self.depthwise:
            x = x + functional.relu(self.norms[0](self.small(layer(x))))
        y = self.norms[1](functional.max_pool2d(x, 3, 1, 1).flatten(2).transpose(1, 2) + self.words(words))
        q, k, v = self.wide(y).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        place = words % y.shape[1]
        index = place.unsqueeze(2).expand_as(y)
        y = y + torch.zeros_like(y).scatter_add(1, index, y.gather(1, index))
        y = torch.cat([y, y.index_select(1, place[0])], 2)
        y = y.softmax(2) * y.sigmoid()
        loss = functional.cross_entropy(self.head(y).flatten(0, 1), place.flatten())
        return loss + y.sum(1).square().mean()


def with_achieved(devices: Sequence[Device], targets: Sequence[Target], effort: Extent, log: Log) -> list[Device]:
    """[D] Returns the devices, those that are processor cores with the shares of classes of kernels measured. Alike
    cores tell them together: what other programs take of one of them is no property of it."""
    cores = [number for number, target in enumerate(targets) if target.device.type == "cpu"]
    timed: dict[str, list[_TimedOp]] = defaultdict(list)  # by kind of core
    for samples, width, side in effort.probes if cores else ():
        log(f"classes of kernels on all cores at once, {samples} images of {side} x {side} with {width} channels")
        model, words = Probe(width), torch.randint(_WORDS, (samples, (side // 4) ** 2))
        inputs = (torch.randn(samples, 3, side, side), words)
        program = capture(model, inputs, name="classes").program
        step = PlacedProgram(program, program.bind(model, inputs, {}), [np.arange(program.graph.num_ops)])

        def measured(number: int, step: PlacedProgram = step) -> I64:
            measurement = measure_programs({"": step}, [targets[number]], steps=_STEPS)[""]
            return measurement.op_medians_ns()[0]

        with ThreadPoolExecutor(len(cores)) as pool:
            times_ns = dict(zip(cores, pool.map(measured, cores), strict=True))
        for number in cores:
            timed[devices[number].kind] += _timed_ops(program.graph, devices[number], times_ns[number])
    shares = {kind: MappingProxyType(_shares(ops)) for kind, ops in timed.items()}
    return [
        replace(device, achieved=shares[device.kind]) if number in cores else device
        for number, device in enumerate(devices)
    ]


class _TimedOp(NamedTuple):
    """An op of a probe."""

    parts_ns: dict[str, float]  # by class of its kernels: what they would take at the figures of the device
    time_ns: float  # without launches


def _timed_ops(graph: Graph, device: Device, times_ns: I64) -> list[_TimedOp]:
    """Returns the ops that take more than launches; `times_ns` [N] is what they took."""
    kernels, timed = kernels_of(graph, rule_of), []
    kernels_ns, ends = kernel_times(kernels, replace(device, launch_ns=0)), kernels.offsets
    launched_ns = kernels.counts * device.launch_ns
    for op in np.flatnonzero(times_ns > _NO_LAUNCHES * launched_ns).tolist():
        own = slice(ends[kernels.ops[op]], ends[kernels.ops[op] + 1])
        parts_ns: dict[str, float] = defaultdict(float)
        for kind, kernel_ns in zip(kernels.kinds[own].tolist(), kernels_ns[own].tolist(), strict=True):
            parts_ns[CLASSES[kind]] += kernel_ns
        if sum(parts_ns.values()) > 0:
            timed.append(_TimedOp(parts_ns, max(float(times_ns[op] - launched_ns[op]), 1.0)))
    return timed


def _shares(ops: Sequence[_TimedOp]) -> dict[str, float]:
    """Returns the share of each class, by what known ones leave of the times of ops that have the fewest others."""
    known: dict[str, float] = {}
    while unknown := [left for op in ops if (left := op.parts_ns.keys() - known.keys())]:
        fewest, ratios = min(map(len, unknown)), defaultdict[str, list[tuple[float, float]]](list)
        for parts_ns, time_ns in ops:
            left = parts_ns.keys() - known.keys()
            if len(left) == fewest:
                others_ns = sum(parts_ns[name] / known[name] for name in parts_ns.keys() - left)
                own_ns = sum(parts_ns[name] for name in left)
                for name in left:
                    ratios[name].append((own_ns / max(time_ns - others_ns, _LEAST * time_ns), own_ns))
        known |= {name: _share(values) for name, values in ratios.items()}
    return known


def _share(ratios: Sequence[tuple[float, float]]) -> float:
    """Returns the median of ratios, each counted by the modelled ns of its op, within what a device may tell."""
    values, weights = map(np.array, zip(*sorted(ratios), strict=True))
    median = values[np.searchsorted(np.cumsum(weights), weights.sum() / 2)]
    return round(min(max(float(median), 1e-4), 100.0), 4)
