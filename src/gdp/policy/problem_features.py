"""Features of a problem as a whole, free of scale, by which the style scorer tells problems apart.

N ops, D devices, B equal slices of the critical path, M features.
"""

import numpy as np

from gdp.arrays import F32
from gdp.policy.settings import SCORER
from gdp.policy.unit_source import NUM_SLICES, UnitSource

NUM_PROBLEM_FEATURES = 21


def problem_features(source: UnitSource) -> F32:
    """Returns [M]; ratios are logarithms, shares are from 0 to 1."""
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
    features = {
        "ops": _log(problem.num_ops, largest=2 * SCORER.largest_log) - SCORER.usual_log_ops,
        "devices": _log(num_devices),
        "work over critical path": _log(total_ns / source.critical_ns),
        "work over critical path, a device": _log(total_ns / source.critical_ns / num_devices),
        "bytes sent if no two ops share a device, in time, over work": _log(all_bytes * source.ns_per_byte / total_ns),
        "latencies likewise, over work": _log(source.latency_ns * len(senders) / total_ns),
        "slowest over fastest device": _log(device_ns.max() / device_ns.min()) if len(device_ns) else 0.0,
        "memory alive over memory": _log(alive_bytes / limits.sum()),
        "memory alive over memory of the largest device": _log(alive_bytes / limits.max()),
        "resident bytes over memory": _log(resident_bytes / limits.sum()),
        "longest op over work": _log(work_ns.max() / total_ns),
        "modules over ops": _log(len(set(graph.modules)) / problem.num_ops),
        "fastest over slowest link": _log(rates.max() / rates.min()),
        "work of the forward pass": work_ns[phases == "forward"].sum() / total_ns,
        "work of updates": work_ns[phases == "update"].sum() / total_ns,
        "entropy of work along the critical path": -(in_slices * np.log(in_slices + 1e-9)).sum(),
        "work in its first quarter": in_slices[:quarter].sum(),
        "work in its last quarter": in_slices[-quarter:].sum(),
        "bytes that skip two slices or more": (sent_bytes * (spans > 2)).sum() / all_bytes,
        "slices that a byte spans": (sent_bytes * spans).sum() / all_bytes,
        "consumers of a tensor": _log(len(senders) / max(graph.num_tensors, 1)),
    }
    return np.array(list(features.values()), np.float32)


def _log(ratio: float, largest: float = SCORER.largest_log) -> float:
    return float(np.clip(np.log(max(float(ratio), 1e-9)), -SCORER.largest_log, largest))
