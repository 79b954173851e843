"""Trials: arrangements whose whole step was simulated, and the means that all phases of a choice share.

N ops of a micro-batch, R replicas, P places.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from gdp.arrays import I64
from gdp.budget import Clock, Pace
from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.parallel.layout import Layout
from gdp.parallel.ring_order import ring_over
from gdp.parallel.step import Step
from gdp.search.candidate import Candidate
from gdp.search.layouts.arrangement import Arrangement
from gdp.search.layouts.batch_parts import Parts
from gdp.search.layouts.dispatch import best_dispatch
from gdp.search.layouts.estimate import Estimator
from gdp.search.ops.classical import ClassicalRuns
from gdp.search.question import Question
from gdp.search.settings import DEFAULTS, Settings
from gdp.simulator.constraints import Constraints
from gdp.simulator.plan import Baseline
from gdp.simulator.problem import Problem
from gdp.stop import skip_on_interrupt

_T = TypeVar("_T")
OK, DOES_NOT_FIT, NOT_ALLOWED, ESTIMATED = "ok", "does not fit", "not allowed", "estimated"
_SIMULATION_US = 15.0  # for an op, before it was measured: to cut the step, and to simulate it in several orders
_CLOSING_US = 8.0  # the same at the end: bound, fingerprint, replay and plan file


@dataclass(frozen=True, eq=False)
class Trial:
    """The fate of an arrangement, or of op placement of the whole step."""

    layout: Layout
    devices: tuple[tuple[int, ...], ...]  # [R][P]
    status: str  # OK, DOES_NOT_FIT, NOT_ALLOWED, or ESTIMATED for what was not simulated
    step_time_ns: int
    missing_bytes: int
    step: Step | None = None  # None: not simulated
    problem: Problem | None = None
    candidate: Candidate | None = None
    places: I64 | None = None  # [N] of a replica's ops
    reason: str = ""  # why it is not allowed; "": by a constraint
    baselines: Mapping[str, Baseline] = field(default_factory=dict)  # of op placement: the placers it began from
    is_searched: bool = False
    is_captured: bool = True  # False: simulated with figures between those of two captured steps

    @property
    def way(self) -> Arrangement:
        """The arrangement that it is of."""
        return Arrangement(self.layout, self.devices)

    @property
    def is_whole(self) -> bool:
        """True for op placement of the whole step."""
        return self.layout.is_whole

    @property
    def fits(self) -> bool:
        """True if it was simulated and respects memory and all other constraints."""
        return not self.key[0]

    @property
    def may_be_answer(self) -> bool:
        """True if it was simulated as captured, whether or not it fits."""
        return self.is_captured and self.candidate is not None

    @property
    def key(self) -> tuple[int, int, int]:
        """Figures to compare trials by: those that fit first, by time; then by what is missing; the impossible last."""
        rank = 2 if self.status == NOT_ALLOWED else int(self.missing_bytes > 0)
        return rank, self.missing_bytes, self.step_time_ns

    def with_candidate(self, candidate: Candidate) -> "Trial":
        """Returns this trial with another placement or order."""
        missing = int(candidate.replay.missing_bytes.max())
        return replace(
            self,
            status=DOES_NOT_FIT if missing else OK,
            step_time_ns=candidate.step_time_ns,
            missing_bytes=missing,
            candidate=candidate,
        )


@dataclass(eq=False)
class Choosing:
    """Holds the question and the means that all phases of a choice share."""

    parts: Parts
    cluster: Cluster
    constraints: Constraints
    clock: Clock
    seed: int
    num_threads: int | None
    tell: Callable[[Trial], None]
    layout: Layout | None = None  # that is asked for; None: any
    checkpoint: str | None = None  # the file of a policy for op placement; None: the one that comes with gdp
    settings: Settings = DEFAULTS
    refused: dict[Arrangement, str] = field(default_factory=dict)  # and why
    classical: ClassicalRuns | None = None  # of op placement of a large step
    best: Trial | None = None  # of those that may be the answer, simulated so far
    simulation: Pace = field(default_factory=lambda: Pace(_SIMULATION_US))  # of whole steps
    estimator: Estimator = field(init=False)

    def __post_init__(self) -> None:
        self.estimator = Estimator(self.parts, self.cluster, self.constraints, self.settings, self.clock)

    def question(self, problem: Problem, **others: object) -> Question:
        """Returns the question of how to place the ops of `problem`; `others` are further fields."""
        own = {"seed": self.seed, "checkpoint": self.checkpoint, "num_threads": self.num_threads}
        return Question.about(problem, **own, settings=self.settings, **others)

    def attempt(self, action: Callable[[Arrangement], _T], way: Arrangement) -> _T | None:
        """Returns `action(way)`; None where the model has no such part, cannot be cut so, or an interrupt ends it.

        If its layout was asked for, the InputError goes on.
        """
        try:
            return skip_on_interrupt(self.clock.stop, partial(action, way))
        except InputError as error:
            if self.layout is not None:
                raise
            self.refused[way] = str(error)
            return None

    def num_ops(self, way: Arrangement) -> int:
        """Returns about how many ops the step of `way` has, those of exchanges included."""
        layout = way.layout
        num_ops = self.parts.rough(layout.num_parts).num_ops * sum(layout.microbatches)
        if layout.data == 1:
            return num_ops
        return num_ops + self.estimator.num_exchanging(way, self.estimator.figures(layout).gradient_bytes)

    def seconds(self, way: Arrangement) -> float:
        """Returns about how long it takes to simulate the step of `way`."""
        return self.simulation.seconds(self.num_ops(way))

    def closing_s(self, num_ops: int) -> float:
        """Returns about how long the answer takes once a step of `num_ops` is chosen."""
        return 1e-6 * _CLOSING_US * num_ops

    def has_time(self, way: Arrangement) -> bool:
        """Returns whether the step of `way` can be simulated, and be the answer."""
        return self.clock.has(self.seconds(way) + self.closing_s(self.num_ops(way)))

    def simulate(
        self, arrangement: Arrangement, places: I64, *, is_captured: bool = False, reserve_bytes: int = 0
    ) -> Trial:
        """Returns the step of an arrangement, simulated with these places [N] of a replica's ops.

        Unless `is_captured`, costs interpolated from two captured steps are good enough. `auto` becomes the fewest
        blocks that leave `reserve_bytes` free in one replica; if the whole step then does not fit, it is simulated
        again with a larger reserve. A large step has the rings that a bucket is quickest in, others the best.
        """
        self.estimator.check_size(arrangement)
        parts, layout = self.parts, arrangement.layout
        graph = parts.exact(layout.num_parts) if is_captured else parts.rough(layout.num_parts)
        if len(places) != graph.num_ops:  # few samples may have other ops than those that places were found for
            places = self.estimator.estimate(arrangement).places
        cut = self.estimator.resolved(arrangement, places, reserve_bytes=reserve_bytes)
        cpus, num_ops, trials = self.estimator.cpus(arrangement), self.num_ops(arrangement), list[Trial]()
        for hosts in self.estimator.ring_hosts(arrangement)[: 1 if num_ops > self.settings.large.slow_ops else None]:
            with self.simulation.measured(num_ops, self.clock):
                trials.append(self._simulated(replace(arrangement, layout=cut), graph, places, hosts, cpus))
            if trials[-1].status == NOT_ALLOWED:
                break
        best = replace(min(trials, key=lambda trial: trial.key), layout=layout)
        self.note(best)
        more_bytes = reserve_bytes + best.missing_bytes
        if not self.has_time(arrangement):
            return best
        if self.estimator.resolved(arrangement, places, reserve_bytes=more_bytes) == cut:
            return best
        again = partial(self.simulate, arrangement, places, is_captured=is_captured, reserve_bytes=more_bytes)
        more = skip_on_interrupt(self.clock.stop, again)
        return min(filter(None, (best, more)), key=lambda trial: trial.key)

    def note(self, trial: Trial) -> None:
        """Tells of `trial`, and keeps the best that may be the answer: an interrupt may lose it on its way."""
        if trial.may_be_answer:
            self.best = min(filter(None, (self.best, trial)), key=lambda each: each.key)
        self.tell(trial)

    def _simulated(
        self,
        cut: Arrangement,
        graph: Graph,
        places: I64,
        hosts: tuple[int, ...] | None,
        cpus: tuple[int, ...] | None,
    ) -> Trial:
        """Returns the step of `graph` cut as it is said, with rings over `hosts` [R], activations on `cpus` [R]."""
        layout, devices = cut.layout, cut.devices
        own_places = places if cut.num_places > 1 else None
        step = Step.of(graph, layout, places=own_places, ring=ring_over(self.cluster, devices), hosts=hosts)
        problem = Problem.build(step.graph, self.cluster, self.constraints)
        placement = step.placement(places, devices, cpus)
        self.clock.spend(1)
        if problem.broken_constraints(placement):
            return Trial(layout, devices, NOT_ALLOWED, 0, 0)
        is_captured = self.parts.is_captured(layout.num_parts)
        trial = Trial(layout, devices, OK, 0, 0, step, problem, places=places, is_captured=is_captured)
        return trial.with_candidate(best_dispatch(problem, step, placement, self.clock, self.settings.large))
