"""Hosts: what each op takes of the host that issues its kernels to a device, one after the other.
docs/machine-model.md, section 3a, is the definition: kernels times the device's `issue`, and the op's `host_ns`. A host
that a device does not tell of, with `issue` 0, takes nothing but `host_ns`; so rules say in kernels what Python takes.
N ops, D devices."""

import numpy as np

from gdp.arrays import F64, I64, Bool, mask, narrow, wide
from gdp.cluster import Cluster
from gdp.cluster.changes import only
from gdp.cluster.device import CUDA_GRAPHS, EAGER
from gdp.costs.collectives import COLLECTIVE
from gdp.costs.op_times import has_kernels, op_time_classes, step_kernels
from gdp.costs.table import class_of
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.graph.copies import RECOMPUTED
from gdp.graph.fingerprint import numbered
from gdp.graph.layers import LayerPaths
from gdp.graph.shapes import parsed_calls

CHECKPOINT_KERNELS, RECOMPUTED_KERNELS = 49, 165
"""Kernels that a host issues in the time of the Python of a checkpointed layer, when it runs forward, and when it does
so again in the backward pass, together with its hooks.

Their sum is fitted on the 24 set rows of vTrain, of Megatron's layers, whose host takes 3 ms a layer where 70 kernels
at 11 us are 0.8 ms. A quarter of a layer's time is forward: so it is on one core, with tensors of a few numbers, for a
layer with reentrant checkpoints, autograd functions in Python, a generator of its own for dropout and hooks for
gradients, which takes 4 times as long as one of `torch.nn` alone (benchmarks/host_of_layers.py)."""

EXCHANGE_KERNELS = 5
"""Kernels that a host issues in the time of an exchange between ranks in eager PyTorch, its own among them: six in such
a layer, in a group that launches nothing, take 8 to 14 % more, 4 to 7 kernels each (benchmarks/host_of_layers.py)."""


_OF_UPDATES = {"optimizer.foreach": 0.25, "optimizer.fused": 0.6, "optimizer.for-loop": 0.55}
"""Kernels that a host issues in the time of an optimizer's Python, for each call of a parameter's update: fitted on
AdamW and SGD of 100 and 300 parameters on an H100 (benchmarks/data/h100/further-ops.csv)."""


def host_times(graph: Graph, cluster: Cluster, op_time_ns: I64) -> I64:
    """int64[N, D]: ns of each op on the host of each device: to issue its kernels, none where it takes no time, and its
    `host_ns`. InputError where that overflows."""
    counts_kernels = bool((graph.kernels != 1).any())
    hosts = [
        (device.issue_ns if by_kernels or counts_kernels or not device.achieved else 0, device.runtime, by_kernels)
        for device in cluster.devices
        for by_kernels in [has_kernels(graph, device)]
    ]
    issued = {host: _issue_times(graph, *host) for host in dict.fromkeys(hosts)}
    if not graph.host_ns.any() and not any(times.any() for times in issued.values()):
        return np.broadcast_to(np.int64(0), op_time_ns.shape)
    times_ns = np.stack([issued[host] for host in (hosts[:1] if len(issued) == 1 else hosts)], axis=1)
    times_ns = np.where(narrow(op_time_ns) > 0, times_ns, 0)
    return wide(times_ns + graph.host_ns[:, None], cluster.num_devices)


def loads_ns(graph: Graph, cluster: Cluster, *chosen: Bool) -> list[I64]:
    """Returns what ops take [D] on each device, or its host where that is longer; 0 where an op cannot run."""
    times_ns, device_class = op_time_classes(graph, cluster)
    first = np.unique(device_class, return_index=True)[1]
    hosts_ns = host_times(graph, only(cluster, first.tolist()), times_ns)
    work_ns = np.maximum(times_ns, 0)
    return [np.maximum(work_ns[own].sum(axis=0), hosts_ns[own].sum(axis=0))[device_class] for own in chosen]


def _issue_times(graph: Graph, issue_ns: int, runtime: str, by_kernels: bool) -> I64:
    """Returns the ns [N] that a host takes to issue the kernels of each op; those of a CUDA graph are there already."""
    if not issue_ns or runtime == CUDA_GRAPHS:
        return np.zeros(graph.num_ops, np.int64)
    counts, of_updates = graph.kernels, _update_kernels(graph)
    if float(counts.max() + RECOMPUTED_KERNELS + of_updates.max()) * issue_ns + int(graph.host_ns.max()) >= 2.0**62:
        raise InputError(
            f"graph {graph.name!r}: {counts.max():,} kernels at {issue_ns} ns and {graph.host_ns.max()} ns take hosts "
            "2^62 ns or more; check kernels, host_ns and issue"
        )
    counted = np.where(counts == 1, step_kernels(graph, runtime).counts, counts) if by_kernels else counts
    if runtime == EAGER:
        counted = counted + _checkpoint_kernels(graph) + _exchange_kernels(graph) + of_updates
    return np.asarray(np.ceil(counted * issue_ns), np.int64)


def _checkpoint_kernels(graph: Graph) -> F64:
    """Returns what checkpoints cost [N], in equal parts at the ops of each run of a layer that is recomputed."""
    is_copy = graph.is_in_role(RECOMPUTED)
    found = np.zeros(graph.num_ops)
    if is_copy.any():
        launches = (graph.flops > 0) | (graph.bytes_accessed > 0)
        is_repeated = mask(graph.root[is_copy], graph.num_ops)
        runs = np.flatnonzero(is_repeated[graph.root] & launches)
        layer = LayerPaths.of(graph).of_module
        layers = np.array([layer.get(graph.modules[op], -1) for op in runs.tolist()])
        each = np.stack((layers, graph.microbatches[runs], graph.replicas[runs], is_copy[runs]))
        _, run, counts = np.unique(each, axis=1, return_inverse=True, return_counts=True)
        found[runs] = np.where(is_copy[runs], RECOMPUTED_KERNELS, CHECKPOINT_KERNELS) / counts[run.reshape(-1)]
    return found


def _exchange_kernels(graph: Graph) -> I64:
    """Returns what exchanges between ranks cost [N], beside their own kernels."""
    is_exchange = graph.is_of_kind(*(kind for kind in set(graph.kinds) if class_of(kind) == COLLECTIVE))
    return np.where(is_exchange, EXCHANGE_KERNELS - 1, 0)


def _update_kernels(graph: Graph) -> F64:
    """Returns what the Python of updates of parameters costs [N]."""
    texts, code = numbered(graph.shapes)
    found = np.zeros(len(texts))
    for place, text in enumerate(texts):
        if text.startswith("optimizer."):
            call = parsed_calls(text)[0]
            *_, count = (1, *(number for number in call.arguments if isinstance(number, int)))
            found[place] = _OF_UPDATES.get(call.kind, 0) * min(max(count, 1), 2**62)
    return found[code]
