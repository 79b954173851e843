"""Throughput: how quickly batches follow one another once the replicas are full, and how long each of them takes.

Two stages of 2 and 3 ns, two batches in flight: batch 2 enters at 5, where batch 0 is done, and batch 4 where 2 is.

    d0   0 0 1 1 . 2 2 . 3 3 . 4 4 . 5 5
    d1   . . 0 0 0 1 1 1 2 2 2 3 3 3 4 4 4 5 5 5        time per batch 3 ns, latency 6 ns

Each place in flight of a replica takes `ROUNDS` batches in turn. The first half fills the replica, the second half is
measured: the time per batch is what a place takes for a batch, over the places. It is never less than what the busiest
device computes for a batch, or its host takes. Replicas do not wait for one another, so their rates add up."""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from gdp.arrays import F64, I64
from gdp.errors import InputError
from gdp.parallel.layout import Layout
from gdp.parallel.step import ROUNDS, BatchStream, batch_ends, in_flight, layout_in_flight
from gdp.simulator.constraints import Constraints
from gdp.simulator.orders import GPIPE
from gdp.simulator.plan import Plan
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import Simulation, replay, simulate

_FILL = ROUNDS // 2  # rounds that are not measured


@dataclass(frozen=True, eq=False)
class Throughput:
    """The figures of a stream of batches in its steady state. D devices."""

    time_per_batch_ns: int
    latency_ns: int  # of the slowest batch, from where it enters: one before it is done
    busy_fraction: F64  # [D] share of the time in which the device computes
    num_batches: int  # in flight
    missing_bytes: I64  # [D] by how much the batches in flight pass the memory limit; 0 where they fit

    @classmethod
    def of(cls, simulation: Simulation, layout: Layout) -> "Throughput":
        """Returns the figures of `simulation`, which is of a stream of batches; InputError if it is of something else.
        The micro-batches of `layout` are the batches in flight of each replica."""
        graph = simulation.problem.graph
        rate, latency_ns = Fraction(0), 0
        busy = np.zeros(simulation.problem.num_devices)
        placement, host_time_ns = simulation.placement, simulation.problem.host_time_ns
        duration_ns = simulation.op_finish_ns - simulation.op_begin_ns
        host_ns = host_time_ns[np.arange(len(placement)), placement]
        for replica, done in enumerate(batch_ends(graph, layout)):
            in_flight = layout.microbatches[replica]
            ends = simulation.op_finish_ns[done].reshape(ROUNDS, in_flight)
            own = graph.replicas == replica
            work_ns, issue_ns = (
                np.bincount(placement[own], times_ns[own], len(busy)).astype(np.int64)
                for times_ns in (duration_ns, host_ns)
            )
            measured_ns = int((ends[-1] - ends[_FILL - 1]).sum())
            busiest_ns = Fraction(int(max(work_ns.max(), issue_ns.max())), ROUNDS * in_flight)
            per_batch_ns = max(Fraction(measured_ns, (ROUNDS - _FILL) * in_flight**2), busiest_ns, Fraction(1))
            rate += 1 / per_batch_ns
            latency_ns = max(latency_ns, int(np.diff(ends[_FILL - 1 :], axis=0).max()))
            busy += work_ns / (ROUNDS * in_flight) / float(per_batch_ns)
        return cls(math.ceil(1 / rate), latency_ns, busy, layout.num_parts, simulation.missing_bytes)

    @property
    def batches_per_second(self) -> float:
        """The batches that are done in a second."""
        return 1e9 / self.time_per_batch_ns

    def document(self) -> dict[str, Any]:
        """Returns the figures for `--json`."""
        return {
            "time_per_batch_ns": self.time_per_batch_ns,
            "batches_per_second": self.batches_per_second,
            "latency_ns": self.latency_ns,
            "busy_fraction": self.busy_fraction.tolist(),
            "missing_bytes": self.missing_bytes.tolist(),
        }


def throughput_of_plan(problem: Problem, plan: Plan, num_batches: int) -> Throughput:
    """Returns the figures with `num_batches` in flight in one copy of the model, whose ops are where `plan` puts them.
    `problem` is that of the plan, for one batch."""
    layout = Layout((num_batches,))
    stream = BatchStream.of(problem.graph, layout)
    names = [device.name for device in problem.cluster.devices]
    limits = Constraints(max_memory_bytes=dict(zip(names, problem.memory_limit_bytes.tolist(), strict=True)))
    whole = Problem.build(stream.graph, problem.cluster, limits)
    placement = stream.placement(plan.placement, [range(problem.num_devices)])
    return Throughput.of(simulate(whole, placement, priority=whole.priority(GPIPE, whole.b_level_ns)), layout)


def throughput(plan: Plan) -> Throughput:
    """Returns the figures of a plan of batches in flight, as `place(..., batches=N)` makes it."""
    if plan.problem is None or not in_flight(plan.layout):
        raise InputError("throughput: a plan of batches in flight is expected, as place(..., batches=N) makes it")
    assert plan.layout is not None
    return Throughput.of(replay(plan.problem, plan), layout_in_flight(plan.layout))
