"""Model FLOPs utilisation: what a step computes of what its devices could."""

from typing import TYPE_CHECKING

import numpy as np

from gdp.arrays import I64, unique
from gdp.costs.op_times import has_shares
from gdp.costs.rates import peak_rate
from gdp.graph.copies import MODEL
from gdp.graph.fingerprint import numbered

if TYPE_CHECKING:
    from gdp.cluster import Device
    from gdp.graph import Graph
    from gdp.simulator.problem import Problem


def mfu_of(problem: "Problem", placement: I64, step_time_ns: int) -> tuple[float, str] | None:
    """Returns the utilisation (PaLM, arXiv 2204.02311, appendix B), and the type that it is of; None without FLOPs.

    The FLOPs of forward and backward pass in the type that most of them are in, without those of recomputed ops and of
    exchanges, as a share of what the devices that compute them could in that type during the step: in float32 where one
    has no rate of it, and by that name where none has."""
    graph, devices = problem.graph, problem.cluster.devices
    dtypes, codes = numbered(graph.dtypes)
    by_dtype = np.bincount(codes, _model_flops(graph), len(dtypes))
    if not by_dtype.any() or not step_time_ns or any(has_shares(graph, device) for device in devices):
        return None
    dtype = dtypes[int(by_dtype.argmax())]
    rates = [device.flops_per_second for device in computing_devices(problem, placement)]
    is_slower = all(dtype not in of and peak_rate(of, dtype) == of["float32"] for of in rates)
    total = sum(peak_rate(of, dtype) for of in rates)
    return float(by_dtype.max()) * 1e9 / (step_time_ns * total), "float32" if is_slower else dtype


def computing_devices(problem: "Problem", placement: I64) -> "list[Device]":
    """Returns the devices that compute FLOPs of the model; others in use hold weights, or update them."""
    numbers = unique(placement[_model_flops(problem.graph) > 0])
    return [problem.cluster.devices[number] for number in numbers.tolist()]


def _model_flops(graph: "Graph") -> I64:
    return np.where(graph.is_in_role(MODEL) & ~graph.is_in_phase("update"), graph.flops, 0)
