"""Trials: arrangements whose whole step was simulated, and the means that all phases of a choice share.

N ops of a micro-batch, R replicas, P places.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from gdp.arrays import I64
from gdp.budget import Clock
from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.parallel.layout import Layout
from gdp.parallel.ring_order import ring_over
from gdp.parallel.step import Step
from gdp.search.candidate import Candidate
from gdp.search.classical import ClassicalRuns
from gdp.search.layouts.arrangement import Arrangement
from gdp.search.layouts.dispatch import best_dispatch
from gdp.search.layouts.estimate import Estimator
from gdp.search.layouts.parts import Parts
from gdp.simulator.constraints import Constraints
from gdp.simulator.plan import Baseline
from gdp.simulator.problem import Problem

_T = TypeVar("_T")
OK, DOES_NOT_FIT, NOT_ALLOWED, ESTIMATED = "ok", "does not fit", "not allowed", "estimated"


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
    def is_whole(self) -> bool:
        """True for op placement of the whole step."""
        return self.layout.is_whole

    @property
    def fits(self) -> bool:
        """True if it was simulated and respects memory and all other constraints."""
        return not self.key[0]

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
    refused: dict[Arrangement, str] = field(default_factory=dict)  # and why
    classical: ClassicalRuns | None = None  # of op placement of a large step
    slowest_s: float = 0.0  # of the simulations of whole steps, which a search makes again
    estimator: Estimator = field(init=False)

    def __post_init__(self) -> None:
        self.estimator = Estimator(self.parts, self.cluster, self.constraints, self.clock)

    def attempt(self, action: Callable[[Arrangement], _T], way: Arrangement) -> _T | None:
        """Returns `action(way)`; None where the model has no such part or cannot be cut so.

        If its layout was asked for, the InputError goes on.
        """
        try:
            return action(way)
        except InputError as error:
            if self.layout is not None:
                raise
            self.refused[way] = str(error)
            return None

    def simulate(
        self, arrangement: Arrangement, places: I64, *, is_captured: bool = False, reserve_bytes: int = 0
    ) -> Trial:
        """Returns the step of an arrangement, simulated with these places [N] of a replica's ops.

        Unless `is_captured`, costs interpolated from two captured steps are good enough. `auto` becomes the fewest
        blocks that leave `reserve_bytes` free in one replica; if the whole step then does not fit, it is simulated
        again with a larger reserve.
        """
        parts, layout, devices = self.parts, arrangement.layout, arrangement.devices
        graph = parts.exact(layout.num_parts) if is_captured else parts.rough(layout.num_parts)
        if len(places) != graph.num_ops:  # few samples may have other ops than those that places were found for
            places = self.estimator.estimate(arrangement).places
        cut = self.estimator.resolved(arrangement, places, reserve_bytes=reserve_bytes)
        cpus, ring = self.estimator.cpus(arrangement), ring_over(self.cluster, devices)
        hosts = self.estimator.machine.hosts_of(arrangement)
        trials, began = [], self.clock.seconds
        for ring_hosts in [None] if hosts is None else [None, hosts]:
            step = Step.of(
                graph, cut, places=places if arrangement.num_places > 1 else None, ring=ring, hosts=ring_hosts
            )
            problem = Problem.build(step.graph, self.cluster, self.constraints)
            placement = step.placement(places, devices, cpus)
            self.clock.spend(1)
            if problem.broken_constraints(placement):
                trials.append(Trial(layout, devices, NOT_ALLOWED, 0, 0))
                break
            trial = Trial(layout, devices, OK, 0, 0, step, problem, places=places)
            trial = replace(trial, is_captured=parts.is_captured(layout.num_parts))
            trials.append(trial.with_candidate(best_dispatch(problem, step, placement, self.clock)))
        best = min(trials, key=lambda trial: trial.key)
        self.tell(best)
        self.slowest_s = max(self.slowest_s, self.clock.seconds - began)
        more_bytes, has_time = reserve_bytes + best.missing_bytes, self.clock.has(self.slowest_s)
        if not has_time or self.estimator.resolved(arrangement, places, reserve_bytes=more_bytes) == cut:
            return best
        more = self.simulate(arrangement, places, is_captured=is_captured, reserve_bytes=more_bytes)
        return min(best, more, key=lambda trial: trial.key)
