"""Calibration over processes and hosts: each rank measures its own device, then tensors go from rank to rank.

    every rank   its device's figures, all at the same time
    each pair    a: make 4 KiB -> make 16 KiB -> ... -> make 16 MiB
                 b:            (waits)     read it          ...       read it

A line through the times of the sizes gives a route's latency and bandwidth; others that lie between them, also sent but
not used for the line, tell how well it fits.
"""

import json
import os
import statistics
from collections.abc import Sequence
from itertools import permutations
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor, nn

from gdp.capture import capture
from gdp.cluster import Cluster
from gdp.devices import Device, Route
from gdp.execute.calibration import Calibration, calibrate
from gdp.execute.calibration_work import Log, whole
from gdp.execute.local_devices import LocalDevice
from gdp.execute.processes import ProcessExecutor
from gdp.execute.ranks import Ranks

_KIB = 1024
_FITTED_BYTES = (4 * _KIB, 64 * _KIB, 256 * _KIB, 1024 * _KIB, 4096 * _KIB, 16384 * _KIB)
_CHECKED_BYTES = (16 * _KIB, 128 * _KIB, 512 * _KIB, 2048 * _KIB, 8192 * _KIB)
_STEPS, _QUICK_STEPS = 15, 5


class _Sizes(nn.Module):
    """Of each input a tensor of its size is made, and then read."""

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        made = [x + 1 for x in inputs]
        return [y.sum() for y in made]  # of a part, no more than the part would be sent


def rank_names(devices: Sequence[LocalDevice]) -> tuple[list[str], list[str]]:
    """(name, place) of the device of each rank that torchrun started; hosts are taken to be alike."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    on_host = int(os.environ.get("LOCAL_WORLD_SIZE", str(count)))
    chosen = [devices[rank % on_host % len(devices)] for rank in range(count)]
    if count == on_host:
        names = [device.name for device in chosen]
    else:
        names = [f"host{rank // on_host}-{device.name}" for rank, device in enumerate(chosen)]
    return names, [device.place for device in chosen]


def calibrate_ranks(ranks: Ranks, device: LocalDevice, *, quick: bool, on_progress: Log) -> Calibration | None:
    """`calibrate` with a process for each device, this rank's being `device`; None on all ranks but the first.

    Figures are those of all devices at work at once; none was alone. A route has a channel of its own.
    """
    ranks.meet("begin")
    own = calibrate([device], quick=quick, on_progress=on_progress)
    ranks.store.set(f"device/{ranks.rank}", json.dumps(own.cluster.to_document()["devices"][0]))
    routes, errors = _routes(ranks, _QUICK_STEPS if quick else _STEPS, on_progress)
    if not ranks.is_first:
        return None
    found = [json.loads(ranks.store.get(f"device/{rank}")) for rank in range(len(ranks.names))]
    devices = [
        Device(
            name, document["kind"], document["memory"], MappingProxyType(document["flops"]),
            document["memory_bandwidth"], document["launch"],
        )
        for name, document in zip(ranks.names, found, strict=True)
    ]  # fmt: skip
    cluster = Cluster.build("processes", devices, routes)
    if not errors:  # of a single device
        return Calibration(cluster, {}, ())
    note = (
        "transfers of sizes between those that the routes were fitted to, with nothing else at work: "
        f"median error {statistics.median(errors):.0%}, largest {max(errors):.0%}"
    )
    return Calibration(cluster, {}, (note,), tuple(errors))


def _routes(ranks: Ranks, num_steps: int, log: Log) -> tuple[dict[tuple[int, int], Route], list[float]]:
    """On the first rank: the route of each ordered pair, and the relative errors of the lines."""
    sizes = sorted((*_FITTED_BYTES, *_CHECKED_BYTES))
    inputs = [torch.zeros(size // 4) for size in sizes]
    program = capture(_Sizes(), inputs, name="sizes", training=False).program
    kinds = program.graph.kinds
    made = [op for op, kind in enumerate(kinds) if kind in ("input", "aten.add")]
    read = [op for op in range(program.graph.num_ops) if op not in made]
    bound = program.bind_inputs(inputs, {})
    routes, errors = {}, []
    for a, b in permutations(range(len(ranks.names)), 2):
        log(f"transfers from {ranks.names[a]} to {ranks.names[b]}")
        order = [made if rank == a else read if rank == b else [] for rank in range(len(ranks.names))]
        times_ns: dict[int, list[int]] = {size: [] for size in sizes}
        with ProcessExecutor(program, order, ranks) as executor:
            for number in range(-2, num_steps):
                record = executor.step(bound, is_timed=True)
                for transfer in record.transfers if number >= 0 else ():
                    times_ns[transfer.num_bytes].append(transfer.arrival_ns - transfer.start_ns)
        if ranks.is_first:
            medians = {size: statistics.median(times) for size, times in times_ns.items() if times}
            latency_ns, ns_per_byte = _line({size: medians[size] for size in _FITTED_BYTES if size in medians})
            routes[a, b] = Route(round(latency_ns), whole(1e9 / ns_per_byte), (f"{ranks.names[a]}->{ranks.names[b]}",))
            errors += [
                abs((latency_ns + ns_per_byte * size) / medians[size] - 1.0)
                for size in _CHECKED_BYTES
                if size in medians
            ]
    return routes, errors


def _line(times_ns: dict[int, float]) -> tuple[float, float]:
    """(ns, ns per byte) of a line through times by size: least squares of relative errors; neither below 0."""
    sizes, times = np.array(list(times_ns)), np.array(list(times_ns.values()))
    design = np.stack([np.ones(len(sizes)), sizes], axis=1) / times[:, None]
    latency, slope = np.linalg.lstsq(design, np.ones(len(sizes)))[0].tolist()
    return max(latency, 0.0), max(slope, 1e-6)
