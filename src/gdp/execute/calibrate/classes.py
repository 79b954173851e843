"""Classes of kernels on processor cores: what share of the peak rate or the bandwidth each of them reaches.

A step of a model with layers of all classes is run on all cores at once. An op takes its kernels' time at the figures
of the device, divided by the share of their class: the median over ops and sizes, in the caches and out of them, each
counted by its modelled time: other programs do not change that.
"""

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from gdp.cluster import Device
from gdp.costs.kernels import CLASSES, kernels_of
from gdp.costs.rates import kernel_times
from gdp.costs.table import rule_of
from gdp.execute.calibrate.work import Extent, Log
from gdp.execute.measurement import PlacedProgram, measure_programs
from gdp.execute.targets import Target
from gdp.models.pytorch import capture

_WORDS, _STEPS = 10_000, 5
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

    def forward(self, images: Tensor, words: Tensor) -> Tensor:
        x = self.grouped(functional.gelu(self.dense(self.first(images))))
        for layer in self.depthwise:
            x = x + functional.relu(self.norms[0](self.small(layer(x))))
        y = self.norms[1](functional.max_pool2d(x, 3, 1, 1).flatten(2).transpose(1, 2) + self.words(words))
        q, k, v = self.wide(y).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        y = torch.cat([y, y.index_select(1, words[0] % y.shape[1])], 2)
        return (y.softmax(2) * y.sigmoid()).sum(1).square().mean()


def with_achieved(devices: Sequence[Device], targets: Sequence[Target], effort: Extent, log: Log) -> list[Device]:
    """[D] Returns the devices, those that are processor cores with the shares of classes of kernels measured."""
    cores = [number for number, target in enumerate(targets) if target.device.type == "cpu"]
    ratios: list[dict[str, list[tuple[float, int]]]] = [defaultdict(list) for _ in devices]
    for samples, width, side in effort.probes if cores else ():
        log(f"classes of kernels on all cores at once, {samples} images of {side} x {side} with {width} channels")
        model, words = Probe(width), torch.randint(_WORDS, (samples, (side // 4) ** 2))
        inputs = (torch.randn(samples, 3, side, side), words)
        program = capture(model, inputs, name="classes").program
        step = PlacedProgram(program, program.bind(model, inputs, {}), [np.arange(program.graph.num_ops)])

        def measured(number: int, step: PlacedProgram = step) -> np.ndarray:
            measurement = measure_programs({"": step}, [targets[number]], steps=_STEPS)[""]
            return measurement.op_medians_ns()[0]

        with ThreadPoolExecutor(len(cores)) as pool:
            times_ns = dict(zip(cores, pool.map(measured, cores), strict=True))
        kernels = kernels_of(program.graph, rule_of)
        ends = kernels.offsets.tolist()
        for number in cores:
            own_ns = kernels.summed(kernel_times(kernels, replace(devices[number], launch_ns=0)))
            launched_ns = kernels.counts * devices[number].launch_ns
            ratio = own_ns / np.maximum(times_ns[number] - launched_ns, 1)
            is_long = times_ns[number] > _NO_LAUNCHES * launched_ns
            for op in np.flatnonzero(is_long & (own_ns > 0)).tolist():
                row = int(kernels.ops[op])
                for kind in set(kernels.kinds[ends[row] : ends[row + 1]].tolist()):
                    ratios[number][CLASSES[kind]].append((float(ratio[op]), int(own_ns[op])))
    return [
        replace(device, achieved=MappingProxyType({name: _share(values) for name, values in by_class.items()}))
        for device, by_class in zip(devices, ratios, strict=True)
    ]


def _share(ratios: Sequence[tuple[float, int]]) -> float:
    """Returns the median of ratios, each counted by the modelled ns of its op, within what a device may tell."""
    values, weights = map(np.array, zip(*sorted(ratios), strict=True))
    median = values[np.searchsorted(np.cumsum(weights), weights.sum() / 2)]
    return round(min(max(float(median), 1e-4), 100.0), 4)
