"""The means that all phases of a choice of layouts share: simulations of whole steps, and what is known so far. N ops
of a micro-batch, R replicas, P places."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from gdp.arrays import I64
from gdp.budget import Clock
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.parallel.rings import rings_over
from gdp.parallel.step import Step
from gdp.search.batch_parts import Parts
from gdp.search.candidate import Arrangement, BatchCut, Candidate
from gdp.search.layouts.dispatch import best_dispatch
from gdp.search.layouts.estimate import Estimator
from gdp.search.ops.classical import ClassicalRuns
from gdp.search.question import BatchQuestion
from gdp.search.settings import Settings
from gdp.simulator.plan import Baseline
from gdp.simulator.problem import Problem
from gdp.stop import skip_on_interrupt

_T = TypeVar("_T")


@dataclass(eq=False)
class LayoutSearch:
    """A search for the best layout: its question, its clock, and what it knows so far."""

    question: BatchQuestion
    clock: Clock
    refused: dict[Arrangement, str] = field(default_factory=dict)  # and why
    classical: ClassicalRuns | None = None  # of op placement of a large step
    baselines: Mapping[str, Baseline] = field(default_factory=dict)  # that op placement began from
    plain: Baseline | None = None  # plain data parallelism, as it was known before
    best: Candidate | None = None  # of those that may be the answer, simulated so far
    estimator: Estimator = field(init=False)

    def __post_init__(self) -> None:
        asked = self.question
        self.estimator = Estimator(asked.parts, asked.cluster, asked.constraints, asked.settings, self.clock)

    @property
    def parts(self) -> Parts:
        """The batch."""
        return self.question.parts

    @property
    def settings(self) -> Settings:
        """The numbers that tune it."""
        return self.question.settings

    def attempt(self, action: Callable[[Arrangement], _T], way: Arrangement) -> _T | None:
        """Returns `action(way)`; None where the model has no such part, cannot be cut so, or an interrupt ends it. If
        its layout was asked for, the InputError goes on."""
        try:
            return skip_on_interrupt(self.clock.stop, partial(action, way))
        except InputError as error:
            if self.question.layout is not None:
                raise
            self.refused[way] = str(error)
            return None

    def num_ops(self, way: Arrangement) -> int:
        """Returns about how many ops the step of `way` has, those of exchanges included."""
        layout = way.layout
        num_ops = self.parts.rough(layout.num_parts).num_ops * sum(layout.microbatches)
        if layout.data == 1:
            return num_ops
        return num_ops + self.estimator.rings.num_exchanging(
            way, self.estimator.replicas.figures(layout).gradient_bytes
        )

    def seconds(self, way: Arrangement) -> float:
        """Returns about how long it takes to simulate the step of `way`."""
        return self.clock.effort.simulate.seconds(self.num_ops(way))

    def has_time(self, way: Arrangement) -> bool:
        """Returns whether the step of `way` can be simulated, and be the answer."""
        num_ops, effort = self.num_ops(way), self.clock.effort
        return self.clock.has(effort.simulate.seconds(num_ops) + effort.close.seconds(num_ops))

    def simulate(
        self, arrangement: Arrangement, places: I64, *, is_captured: bool = False, reserve_bytes: int = 0
    ) -> Candidate:
        """Returns the step of an arrangement, simulated with these places [N] of a replica's ops. Unless `is_captured`,
        costs interpolated from two captured steps are good enough. `auto` becomes the fewest blocks that leave
        `reserve_bytes` free in one replica; if the whole step then does not fit, it is simulated again with a larger
        reserve. A large step has the rings that a bucket is quickest in, others the best."""
        self.estimator.check_size(arrangement)
        parts, layout = self.parts, arrangement.layout
        graph = parts.exact(layout.num_parts) if is_captured else parts.rough(layout.num_parts)
        if len(places) != graph.num_ops:  # few samples may have other ops than those that places were found for
            places = self.estimator.estimate(arrangement).places
        cut = self.estimator.resolved(arrangement, places, reserve_bytes=reserve_bytes)
        cpus, num_ops, candidates = self.estimator.cpus(arrangement), self.num_ops(arrangement), list[Candidate]()
        for hosts in self.estimator.rings.hosts(arrangement)[: 1 if num_ops > self.settings.large.slow_ops else None]:
            with self.clock.effort.simulate.measured(num_ops, self.clock):
                candidates.append(self._simulated(replace(arrangement, layout=cut), graph, places, hosts, cpus))
            if candidates[-1].refusal is not None:
                break
        best = min(candidates)
        assert best.cut is not None
        best = replace(best, cut=replace(best.cut, arrangement=arrangement))
        self.note(best)
        more_bytes = reserve_bytes + best.missing_bytes
        if not self.has_time(arrangement):
            return best
        if self.estimator.resolved(arrangement, places, reserve_bytes=more_bytes) == cut:
            return best
        again = partial(self.simulate, arrangement, places, is_captured=is_captured, reserve_bytes=more_bytes)
        more = skip_on_interrupt(self.clock.stop, again)
        return min(filter(None, (best, more)))

    def note(self, candidate: Candidate) -> None:
        """Tells of `candidate`, and keeps the best that may be the answer: an interrupt may lose it on its way."""
        if candidate.may_be_answer:
            self.best = min(filter(None, (self.best, candidate)))
        self.question.tell(candidate)

    def _simulated(
        self, cut: Arrangement, graph: Graph, places: I64, hosts: tuple[int, ...] | None, cpus: tuple[int, ...] | None
    ) -> Candidate:
        """Returns the step of `graph` cut as it is said, with rings over `hosts` [R], activations on `cpus` [R]."""
        layout, devices, cluster = cut.layout, cut.devices, self.question.cluster
        own_places = places if cut.num_places > 1 else None
        step = Step.of(graph, layout, places=own_places, **rings_over(cluster, devices, layout, hosts))
        problem = Problem.build(step.graph, cluster, self.question.constraints)
        placement = step.placement(places, devices, cpus)
        self.clock.spend(1)
        known = BatchCut(cut, step, places, self.parts.is_captured(layout.num_parts))
        if problem.broken_constraints(placement):
            return Candidate.refused(BatchCut(cut))
        candidate = best_dispatch(problem, step, placement, self.clock, self.settings.large)
        return replace(candidate, cut=known)
