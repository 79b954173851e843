"""Remarks on running a plan on this machine: shared cores, other processors than the plan's, other work."""

import os
from collections.abc import Iterator, Sequence
from itertools import combinations

from gdp.cluster import Cluster
from gdp.cluster.catalogue import KINDS
from gdp.cluster.detect import host
from gdp.execute.targets import Target

_BUSY = 0.5  # of the cores, as load average before the run: a device would wait for other work


def machine_notes(targets: Sequence[Target], cluster: Cluster | None) -> Iterator[str]:
    """Yields sentences for the user, before the plan runs."""
    for first, second in combinations(targets, 2):
        shared = sorted(set(first.cores) & set(second.cores))
        if shared:
            common = "core " + str(shared[0]) if len(shared) == 1 else f"cores {shared[0]}-{shared[-1]}"
            yield (
                f"{first.name} and {second.name} share {common}: they compute in turn, so times are not those of two "
                "devices."
            )
        elif first.device == second.device and first.device.type == "cuda":
            yield f"{first.name} and {second.name} share {first.place}, so times are not those of two devices."
    for target, device in zip(targets, () if cluster is None else cluster.devices, strict=False):
        here = host.cpu_kind(target.num_threads)
        if target.device.type == "cpu" and device.kind in KINDS and device.kind != here:
            yield (
                f"{target.name} runs on {target.place} ({here}), which is not a {device.kind}: the prediction is for "
                "another machine; gdp devices measure and --devices local are for this one."
            )
    num_cores = len(host.all_cores())
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > _BUSY * num_cores:
        yield (
            f"The machine was busy before the run (load average {load:.1f} on {num_cores} cores): times are longer "
            "than they would be."
        )
