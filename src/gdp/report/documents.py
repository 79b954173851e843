"""Builds the JSON documents of `--json`: stable keys, times in ns, sizes in bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gdp.cluster import Cluster
from gdp.costs.op_times import count_time_sources
from gdp.costs.ranges import StepRange
from gdp.graph import Graph
from gdp.graph.held_memory import HeldMemory
from gdp.graph.parameter_bytes import ParameterBytes
from gdp.models.serving import ServedStep, serving_entry
from gdp.planning.advice import Advice
from gdp.planning.compare import Comparison
from gdp.planning.remedies import Remedy
from gdp.report.advice_answer import advice_document
from gdp.report.batches_answer import in_flight_of
from gdp.report.sentences import per_second
from gdp.simulator.plan import Plan
from gdp.simulator.simulate import Simulation
from gdp.simulator.throughput import Throughput


def graph_document(graph: Graph) -> dict[str, Any]:
    """Returns name, sizes and fingerprint of a graph."""
    held, each = HeldMemory.of(graph), ParameterBytes.of(graph)
    return {
        "name": graph.name,
        "num_ops": graph.num_ops,
        "num_tensors": graph.num_tensors,
        "parameter_bytes": held.parameter_bytes,
        "optimizer_state_bytes": held.optimizer_state_bytes,
        "bytes_per_parameter": None if each is None else {"total": each.total, **asdict(each)},
        "fingerprint": graph.fingerprint,
    }


def cluster_document(cluster: Cluster) -> dict[str, Any]:
    """Returns name, devices and fingerprint of a cluster."""
    devices = [device.name for device in cluster.devices]
    return {"name": cluster.name, "devices": devices, "fingerprint": cluster.fingerprint}


def range_entry(step_time_ns: int | None, step_range: StepRange | None) -> dict[str, Any]:
    """Returns the keys of the range of a step time; null where there is none."""
    if step_time_ns is None or step_range is None:
        return {"step_time_range_ns": None, "range_rests_on": None}
    return {"step_time_range_ns": list(step_range.of(step_time_ns)), "range_rests_on": step_range.rests_on}


def _gap(step_time_ns: int, bound_ns: int) -> float | None:
    """Returns how far a step time is above a bound, as a share; None if only the bound is 0."""
    if step_time_ns == bound_ns:
        return 0.0
    return step_time_ns / bound_ns - 1.0 if bound_ns else None


def place_document(
    cluster: Cluster,
    plan: Plan,
    simulation: Simulation,
    path: Path | None,
    *,
    advice: Advice | None,
    remedies: Sequence[Remedy],
    held_bytes: int,
    served: ServedStep | None = None,
    amounts: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Any]:
    """Returns the answer of `gdp place --json`. `path` is None if no plan was written; `remedies` are changes with
    which a plan would fit; `held_bytes` are those of the uncut step; `amounts` are its samples and tokens."""
    assert plan.search is not None
    noisy, graph = plan.search.under_noise, simulation.problem.graph
    return {
        "graph": graph_document(graph),
        "cluster": cluster_document(cluster),
        "placer": plan.placer,
        "status": plan.status,
        "step_time_ns": plan.step_time_ns,
        "lower_bound_ns": plan.lower_bound_ns,
        "gap": _gap(plan.step_time_ns, plan.lower_bound_ns),
        "peak_memory_bytes": plan.peak_memory_bytes.tolist(),
        "busy_fraction": plan.search.busy_fraction.tolist(),
        "host_wait_fraction": simulation.host_wait_fraction.tolist(),
        **range_entry(plan.step_time_ns, simulation.step_range),
        "mfu": simulation.mfu and simulation.mfu[0],
        "per_second": per_second(plan.step_time_ns, amounts),
        "baselines": {
            name: {"status": baseline.status, "step_time_ns": baseline.step_time_ns, "seconds": baseline.seconds}
            for name, baseline in plan.search.baselines.items()
        },
        "seconds": plan.search.seconds,
        "simulations": plan.search.simulations,
        "plan": None if path is None else str(path),
        **({"layout": plan.layout} if plan.num_ranks > 1 else {}),
        "microbatches": max(int(simulation.problem.microbatch.max()) + 1, 1),
        "order": plan.search.order,
        "under_noise": None if noisy is None else asdict(noisy),
        "advice": None if advice is None else advice_document(advice),
        "held_bytes": held_bytes,
        "would_fit": [remedy.change for remedy in remedies],
        "remedies": [remedy._asdict() for remedy in remedies],
    } | (
        ({"op_times": count_time_sources(graph, cluster)} if any(graph.times_ns) else {})
        | serving_entry(served, plan.step_time_ns)
    )


def compare_document(
    graph: Graph, cluster: Cluster, comparison: Comparison, budget: str, served: ServedStep | None = None
) -> dict[str, Any]:
    """Returns the answer of `gdp compare --json`; each row of a `served` step tells its speed."""
    return {
        "graph": graph_document(graph),
        "cluster": cluster_document(cluster),
        "budget": budget,
        "batches": comparison.num_batches or None,
        "rows": [
            {
                "placer": row.placer,
                "status": row.status,
                "step_time_ns": row.step_time_ns,
                "step_time_ns_by_seed": list(row.step_time_ns_by_seed),
                "seconds": row.seconds,
                "simulations": row.simulations,
                "lower_bound_ns": comparison.bound_of(row),
                **range_entry(row.step_time_ns, row.step_range),
                "mfu": None if row.step_time_ns is None else row.mfu,
                "layout": None if row.layout is None else row.layout.document(),
                "reason": row.reason or None,
            }
            | serving_entry(served, row.step_time_ns)
            for row in comparison.rows
        ],
        "lower_bound_ns": min(map(comparison.bound_of, comparison.rows), default=comparison.lower_bound_ns),
    }


def simulate_document(
    plan: Plan | None,
    simulation: Simulation,
    bound_ns: int,
    served: ServedStep | None = None,
    throughput: Throughput | None = None,
) -> dict[str, Any]:
    """Returns the answer of `gdp simulate --json`: figures of the replay, and the bound derived anew. `plan` is None
    for a bare placement, and `throughput` without batches in flight."""
    serving = serving_entry(served, simulation.step_time_ns)
    if throughput is not None:
        serving = {} if served is None else {"serving": served.in_flight(*in_flight_of(throughput, simulation))}
        serving["throughput"] = throughput.document()
    problem = simulation.problem
    made = {} if plan is None else {"placer": plan.placer, "seed": plan.seed, "gdp_version": plan.gdp_version}
    return {
        "graph": graph_document(problem.graph),
        "cluster": cluster_document(problem.cluster),
        **made,
        "step_time_ns": simulation.step_time_ns,
        "lower_bound_ns": bound_ns,
        "gap": _gap(simulation.step_time_ns, bound_ns),
        "peak_memory_bytes": simulation.peak_memory_bytes.tolist(),
        "busy_fraction": simulation.busy_fraction.tolist(),
        "host_wait_fraction": simulation.host_wait_fraction.tolist(),
        **range_entry(simulation.step_time_ns, simulation.step_range),
        "mfu": simulation.mfu and simulation.mfu[0],
        "feasible": simulation.feasible,
        "reasons": simulation.reasons,
    } | serving
