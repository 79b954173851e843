"""Features of a problem as a whole, free of scale, by which the style scorer tells problems apart.

N ops, D devices, B equal slices of the critical path, M features.
"""

import numpy as np

from gdp.arrays import F32
from gdp.policy.settings import SCORER
from gdp.policy.unit_graph import NUM_SLICES, UnitSource

PROBLEM_FEATURES = (
    "ops",
    "devices",
    "work over critical path",
    "work over critical path, a device",
    "bytes sent if no two ops share a device, in time, over work",
    "latencies likewise, over work",
    "slowest over fastest device",
    "memory alive over memory",
    "memory alive over memory of the largest device",
    "resident bytes over memory",
    "longest op over work",
    "modules over ops",
    "fastest over slowest link",
    "work of the forward pass",
    "work of updates",
    "entropy of work along the critical path",
    "work in its first quarter",
    "work in its last quarter",
    "bytes that skip two slices or more",
    "slices that a byte spans",
    "consumers of a tensor",
)


def problem_features(source: UnitSource) -> F32:
    """Returns [M], by `PROBLEM_FEATURES`; ratios are logarithms, shares are from 0 to 1."""
    problem, graph, cluster = source.problem, source.problem.graph, source.problem.cluster
    num_devices, phases = problem.num_devices, np.array(graph.phases)
    work_ns = problem.mean_op_time_ns.astype(np.float64)
    total_ns = max(float(work_ns.sum()), 1.0)
    device_ns = np.where(problem.allowed, problem.op_time_ns, 0).sum(axis=0).astype(np.float64)
    device_ns = device_ns[device_ns > 0]
    between = ~np.eye(num_devices, dtype=np.bool_)
    rates = cluster.bytes_per_second[between].astype(np.float64) if num_devices > 1 else np.ones(1)
    limits = np.maximum(problem.memory_limit_bytes.astype(np.float64), 1.0)
    resident_bytes = float(graph.resident_bytes.sum())
    alive_bytes = resident_bytes + source.alive_share * float(problem.simulator.arrays.memory.alloc_bytes.sum())
    num_consumers = np.diff(graph.consumer_offsets)
    sent_bytes = np.repeat(graph.tensor_bytes, num_consumers).astype(np.float64)
    senders = np.repeat(graph.producers, num_consumers)
    spans = np.abs(source.op_slice[graph.consumers] - source.op_slice[senders])
    all_bytes = max(float(sent_bytes.sum()), 1.0)
    in_slices = np.bincount(source.op_slice, work_ns, NUM_SLICES) / total_ns
    quarter = NUM_SLICES // 4
    features = [
        _log(problem.num_ops, largest=2 * SCORER.largest_log) - SCORER.usual_log_ops,
        _log(num_devices),
        _log(total_ns / source.critical_ns),
        _log(total_ns / source.critical_ns / num_devices),
        _log(all_bytes * source.ns_per_byte / total_ns),
        _log(source.latency_ns * len(senders) / total_ns),
        _log(device_ns.max() / device_ns.min()) if len(device_ns) else 0.0,
        _log(alive_bytes / limits.sum()),
        _log(alive_bytes / limits.max()),
        _log(resident_bytes / limits.sum()),
        _log(work_ns.max() / total_ns),
        _log(len(set(graph.modules)) / problem.num_ops),
        _log(rates.max() / rates.min()),
        work_ns[phases == "forward"].sum() / total_ns,
        work_ns[phases == "update"].sum() / total_ns,
        -(in_slices * np.log(in_slices + 1e-9)).sum(),
        in_slices[:quarter].sum(),
        in_slices[-quarter:].sum(),
        (sent_bytes * (spans > 2)).sum() / all_bytes,
        (sent_bytes * spans).sum() / all_bytes,
        _log(len(senders) / max(graph.num_tensors, 1)),
    ]
    return np.array(features, np.float32)


def _log(ratio: float, largest: float = SCORER.largest_log) -> float:
    return float(np.clip(np.log(max(float(ratio), 1e-9)), -SCORER.largest_log, largest))
