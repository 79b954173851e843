"""One replica: its step with a few micro-batches, simulated alone, and sums over its ops. N ops of one micro-batch, D
devices, P places of a replica."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, TypeVar

import numpy as np

from gdp.arrays import I64
from gdp.budget import Clock, Effort
from gdp.cluster import Cluster
from gdp.cluster.changes import only
from gdp.costs.hosts import loads_ns
from gdp.graph import Graph
from gdp.graph.interpolation import have_same_ops
from gdp.graph.microbatches import shared_ops
from gdp.parallel.buckets import gradients_of
from gdp.parallel.layout import AUTO, NONE, Layout
from gdp.parallel.recompute import Recomputation, blocks_to_recompute
from gdp.parallel.step import Step, with_waits
from gdp.search.batch_parts import Parts
from gdp.search.candidate import Arrangement, Figures
from gdp.search.layouts.arrangement import DeviceSpeeds
from gdp.search.layouts.dispatch import levels_of
from gdp.search.settings import Settings
from gdp.simulator.constraints import Constraints
from gdp.simulator.problem import Placement, Problem
from gdp.simulator.simulate import Simulation, simulate

_T = TypeVar("_T")


class Memo:
    """Keeps what was made, by a key that begins with its kind."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def __call__(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """Returns what `make` made when this key was first asked for."""
        if key not in self._made:
            self._made[key] = make()
        answer: _T = self._made[key]
        return answer


@dataclass(frozen=True, eq=False)
class PartFigures:
    """Sums over the ops of one micro-batch [N] on each device [D] or its host, in ns, and over parameters, in bytes."""

    once_ns: I64  # [D] updates
    backward_ns: I64  # [D]
    each_ns: I64  # [D] what is done for every micro-batch, the backward pass too
    gradient_bytes: int
    state_bytes: int  # of the optimizer
    parameter_bytes: int
    resident_bytes: int  # of these two, and of buffers

    @classmethod
    def of(cls, graph: Graph, cluster: Cluster) -> "PartFigures":
        """Returns the sums of the step `graph`."""
        is_source, is_update = shared_ops(graph)
        is_backward = graph.is_in_phase("backward") & ~is_update
        once_ns, backward_ns, each_ns = loads_ns(graph, cluster, is_update, is_backward, ~is_update & ~is_source)
        gradients = gradients_of(graph, is_update)
        has_update = np.isin(graph.groups, graph.groups[is_update & (graph.groups >= 0)])
        own = is_source & has_update
        is_own = graph.is_resident & own[graph.producers] & (graph.view_of < 0)
        parameter_bytes = int(graph.tensor_bytes[is_own].sum())
        return cls(
            once_ns=once_ns,
            backward_ns=backward_ns,
            each_ns=each_ns,
            gradient_bytes=sum(gradient.num_bytes for gradient in gradients.values()),
            state_bytes=max(int(graph.resident_bytes[own].sum()) - parameter_bytes, 0),
            parameter_bytes=parameter_bytes,
            resident_bytes=int(graph.resident_bytes.sum()),
        )


def with_gradients_cut(graph: Graph, count: int) -> Graph:
    """Returns the step with gradients of a `count`-th of their bytes: one replica's chunks, when the rest is sent."""
    if count == 1:
        return graph
    gradients = [gradient.tensor for gradient in gradients_of(graph, shared_ops(graph)[1]).values()]
    sizes = graph.tensor_bytes.copy()
    sizes[gradients] = -(-sizes[gradients] // count)
    return replace(graph, tensor_bytes=sizes)


@dataclass(eq=False)
class ReplicaSteps:
    """Cuts and simulates the step of one replica alone, and keeps what several arrangements have in common."""

    parts: Parts
    cluster: Cluster
    machine: DeviceSpeeds
    limits_bytes: I64  # [D] the memory that constraints leave
    settings: Settings
    effort: Effort
    clock: Clock | None = None
    _memo: Memo = field(default_factory=Memo)
    _recomputations: dict[str | tuple[str, ...], list[tuple[Graph, Recomputation]]] = field(default_factory=dict)

    def simulate(
        self, arrangement: Arrangement, replica: int, places: I64, cpu: int | None = None
    ) -> tuple[Simulation, I64]:
        """Returns a replica's step with a few micro-batches, and what one more takes in each of its places [P]. In the
        simulation the `cpu` that its activations go to comes after the P places."""
        layout, own = arrangement.layout, arrangement.devices[replica]
        few = self.num_seen(layout, layout.microbatches[replica], len(own))
        devices = own if cpu is None else (*own, cpu)
        kinds = tuple(int(self.machine.kinds[device]) for device in devices)
        is_cut = layout.zero == 3 or (layout.zero == 2 and layout.microbatches[replica] == 1)
        share = layout.data if is_cut else 1  # replicas that share gradients when the last micro-batch is done

        def make() -> tuple[Simulation, I64]:
            with self.effort.estimate.measured(few * self.parts.rough(layout.num_parts).num_ops, self.clock):
                step = self._step(layout, few, share)
                graph = step.graph if layout.stages is None else with_waits(step.graph, places[step.origin])
                problem = self.alone(graph, devices)
                placement = step.placement(places, [range(len(own))], None if cpu is None else [len(own)])
                best = _best_alone(problem, step, placement)
                is_once = np.logical_or(*shared_ops(step.graph))
                loads_ns = [
                    np.bincount(
                        placement, np.where(is_once, 0, times[np.arange(len(placement)), placement]), len(devices)
                    )
                    for times in (problem.op_time_ns, problem.host_time_ns)
                ]
            return best, np.asarray(np.max(loads_ns, axis=0)[: len(own)] / few, np.int64)

        is_captured = self.parts.is_captured(layout.num_parts)
        cut = layout.num_parts, is_captured, layout.recompute, layout.offload, layout.stages
        return self._memo(("replica", *cut, kinds, few, share, places.tobytes()), make)

    def num_seen(self, layout: Layout, count: int, num_places: int) -> int:
        """Returns the number of micro-batches of a replica to simulate, of `count`."""
        enough = max(self.settings.large.searched_ops // self.parts.rough(layout.num_parts).num_ops, 1)
        return min(count, self.settings.layouts.seen_microbatches * num_places, enough)

    def figures(self, layout: Layout) -> PartFigures:
        """Returns sums over one micro-batch of `layout`; with recompute=auto, of one that recomputes nothing."""
        recompute = NONE if layout.recompute == AUTO else layout.recompute

        def make() -> PartFigures:
            graph = self._step(replace(layout, recompute=recompute, offload=NONE), 1).graph
            return PartFigures.of(graph, self.cluster)

        return self._memo(("figures", layout.num_parts, recompute), make)

    def alone(self, graph: Graph, devices: Sequence[int]) -> Problem:
        """Returns the problem of placing `graph` on `devices`, with the memory that constraints leave there."""
        limits = {self.cluster.devices[d].name: int(self.limits_bytes[d]) for d in devices}
        return Problem.build(graph, only(self.cluster, devices), Constraints(max_memory_bytes=limits))

    def _step(self, layout: Layout, count: int, share: int = 1) -> Step:
        """Returns a replica's step with `count` micro-batches; cut from captured ones only, but for offload. Which
        activations are large enough to be sent away depends on the number of samples. A replica keeps one of `share`
        chunks of each gradient."""
        if layout.offload != NONE:
            part = with_gradients_cut(self.parts.rough(layout.num_parts), share)
            return Step.of(part, Layout((count,), offload=layout.offload))
        made: list[Step] = []

        def graph_of(num_parts: int) -> Graph:
            def make() -> Step:
                part = with_gradients_cut(self._recomputed(num_parts, layout.recompute), share)
                alone = Layout((count,), recompute=layout.recompute)
                return Step.of(self.parts.exact(num_parts), alone, part=part)

            made.append(self._memo(("step", num_parts, count, layout.recompute, share), make))
            return made[-1].graph

        graph = self.parts.between(layout.num_parts, graph_of)
        return replace(made[0], graph=graph)

    def _recomputed(self, num_parts: int, modules: str | tuple[str, ...]) -> Graph:
        """Returns the captured step of one of `num_parts` with blocks recomputed. What is copied is found once for all
        steps with the same ops."""
        graph = self.parts.exact(num_parts)
        if modules == NONE:
            return graph
        for given, known in self._recomputations.setdefault(modules, []):
            if given is graph or have_same_ops(given, graph):
                return known.of_other_sizes(graph)
        found = Recomputation.of(blocks_to_recompute(graph, modules))
        self._recomputations[modules].append((graph, found))
        return found.graph


def _best_alone(problem: Problem, step: Step, placement: Placement) -> Simulation:
    """Returns the step of a replica alone in the best of all orders of its micro-batches. On one device they differ in
    memory only, and so does the order of the program, which `best_dispatch` prefers."""
    is_one_device = len(np.unique(placement)) == 1
    levels = levels_of(problem, step, placement) if is_one_device else [problem.b_level_ns]
    found: list[Simulation] = []
    for order, level in product(problem.orders, levels):
        found.append(simulate(problem, placement, priority=problem.priority(order, level)))
        if is_one_device and not found[-1].missing_bytes.any():
            return found[-1]
    return min(found, key=Figures.of)
