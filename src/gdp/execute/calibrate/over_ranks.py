"""Calibration over processes and hosts: each rank measures its own device, then tensors go from rank to rank.

    every rank   its device's figures, all at the same time
    each pair    a   add     add     add         for each size the time by which a hand-over lengthens a chain of
                 b       add     add             tensors, the mean of both directions

A line through the times of the sizes gives a route's latency and bandwidth."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, combinations

import numpy as np
import numpy.typing as npt
import torch

from gdp.cluster import Cluster, Route
from gdp.cluster.detect import Detected
from gdp.execute.calibrate.calibrate import Calibration, as_alike, calibrate
from gdp.execute.calibrate.work import Chains, Log, line_through, whole
from gdp.execute.ranks.rank_executor import ProcessExecutor
from gdp.execute.ranks.ranks import Ranks
from gdp.models.pytorch import capture

_SIZES_BYTES = tuple(1024 * kib for kib in (4, 64, 256, 1024, 4096, 16384))
_STEPS, _QUICK_STEPS = 15, 5
_CHAIN_OPS = 3  # an odd number: one rank's clock has both ends


def rank_names(devices: Sequence[Detected]) -> tuple[list[str], list[str]]:
    """Returns names and places of the devices of the ranks that torchrun started; hosts are taken to be alike."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    on_host = int(os.environ.get("LOCAL_WORLD_SIZE", str(count)))
    chosen = [devices[rank % on_host % len(devices)] for rank in range(count)]
    if count == on_host:
        names = [device.name for device in chosen]
    else:
        names = [f"host{rank // on_host}-{device.name}" for rank, device in enumerate(chosen)]
    return names, [device.place for device in chosen]


def calibrate_ranks(ranks: Ranks, device: Detected, *, quick: bool, on_progress: Log) -> Calibration | None:
    """Measures as `calibrate`, with a process for each device, `device` being that of this rank. A route has a channel
    of its own. None on all ranks but the first."""
    ranks.share("")  # waits for all
    own = calibrate([device], quick=quick, on_progress=on_progress)
    texts = ranks.share(json.dumps([own.cluster.to_document(), own.notes]))
    documents, notes = zip(*map(json.loads, texts), strict=True)
    devices = [Cluster.from_document(document).devices[0] for document in documents]
    rates = [device.memory_bytes_per_second for device in devices]
    routes = _routes(ranks, rates, _QUICK_STEPS if quick else _STEPS, on_progress)
    if not ranks.is_first:
        return None
    devices = [replace(device, name=name) for device, name in zip(devices, ranks.names, strict=True)]
    all_notes = dict.fromkeys(chain.from_iterable(notes))
    return Calibration(Cluster.build("processes", as_alike(devices), routes), tuple(all_notes))


def _routes(ranks: Ranks, memory_rates: Sequence[int], num_steps: int, log: Log) -> dict[tuple[int, int], Route]:
    """Returns on the first rank the route of each ordered pair. No route is faster than the memory at its ends,
    `memory_rates` in bytes per second: on a busy machine large tensors may seem to take no longer than small ones."""
    inputs = [torch.zeros(size // 4) for size in _SIZES_BYTES]
    program = capture(Chains(_CHAIN_OPS), inputs, name="chains", training=False).program
    bound = program.bind_inputs(inputs, {})
    chains = np.arange(len(inputs), program.graph.num_ops).reshape(len(inputs), _CHAIN_OPS)
    routes = {}
    for a, b in combinations(range(len(ranks.names)), 2):
        log(f"transfers between {ranks.names[a]} and {ranks.names[b]}")
        order: list[list[int]] = [[] for _ in ranks.names]
        order[a] = [*range(len(inputs)), *chains[:, ::2].ravel().tolist()]
        order[b] = chains[:, 1::2].ravel().tolist()
        hops_ns: list[npt.NDArray[np.float64]] = []
        with ProcessExecutor(program, order, ranks) as executor:
            for _ in range(-2, num_steps):
                start, finish, _ = executor.step(bound, is_timed=True).op_times_ns(program.graph.num_ops)
                spans = finish[chains[:, -1]] - start[chains[:, 0]] - (finish - start)[chains].sum(axis=1)
                hops_ns.append(spans / (_CHAIN_OPS - 1))
        if ranks.is_first:
            medians = np.maximum(np.median(hops_ns[2:], axis=0), 1.0).tolist()
            fit = line_through(dict(zip(_SIZES_BYTES, medians, strict=True)))
            latency_ns, ns_per_byte = max(fit[0], 0.0), max(fit[1], 1e9 / min(memory_rates[a], memory_rates[b]))
            for pair in ((a, b), (b, a)):
                channel = "->".join(ranks.names[rank] for rank in pair)
                routes[pair] = Route(round(latency_ns), whole(1e9 / ns_per_byte), (channel,))
    return routes
