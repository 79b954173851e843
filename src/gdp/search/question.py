"""Questions, about the ops of one problem or a batch that may be cut, their `Solution` and the plan of its best.

Op times vary, and a plan should be fast on average: tables of perturbed op times average over noise. N ops, M reduced
ops, D devices, K tables of op times."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import NamedTuple

import numpy as np

from gdp.arrays import I64
from gdp.budget import Clock, has_time
from gdp.cluster import Cluster
from gdp.models.shards import Shards
from gdp.parallel.layout import Layout
from gdp.search.batch_parts import Parts
from gdp.search.candidate import Candidate, Figures
from gdp.search.settings import DEFAULTS, Settings
from gdp.simulator.constraints import Constraints
from gdp.simulator.levels import communication_levels
from gdp.simulator.orders import EXCHANGES_FIRST, PROGRAM, ZERO_BUBBLE, ZERO_BUBBLE_PROGRAM
from gdp.simulator.plan import Baseline, NoisyTimes, Plan, Search
from gdp.simulator.problem import Placement, Problem
from gdp.simulator.simulate import Simulation, mean_step_time_ns, simulate
from gdp.units.reduction import Reduction, reduce

OnProgress = Callable[[Candidate], None]
_WITHOUT_PROGRAM = {PROGRAM: EXCHANGES_FIRST, ZERO_BUBBLE_PROGRAM: ZERO_BUBBLE}
_NUM_REPLAYS, _FEWEST_REPLAYS = 100, 20  # of an answer, for its mean and 95th percentile; below 20 there is none
_REPLAYED_OPS = 1_000_000  # replays times ops: a second


@dataclass(frozen=True, eq=False)
class Noise:
    """Perturbed op times to average step times over, of the original ops [K, N, D] and of the reduced [K, M, D]."""

    original_ns: I64
    reduced_ns: I64

    @classmethod
    def draw(cls, reduction: Reduction, spread: float, num_tables: int, seed: int) -> "Noise":
        """Draws tables with a relative normal noise of deviation `spread` on each original op."""
        original = perturbed_times(reduction.original, spread, num_tables, seed)
        reduced = np.add.reduceat(np.maximum(original, 0)[:, reduction.members], reduction.member_offsets[:-1], axis=1)
        reduced = np.where(reduction.problem.simulator.time_table_ns < 0, -1, reduced)
        reduced.setflags(write=False)
        return cls(original, reduced)


def step_times_under_noise(
    simulation: Simulation, spread: float, seed: int, clock: Clock | None = None
) -> NoisyTimes | None:
    """Replays the order of `simulation` under op times with a relative noise of deviation `spread`. None where `clock`
    is up before there were a few replays."""
    num_ops = simulation.problem.num_ops
    num_draws = max(min(_NUM_REPLAYS, _REPLAYED_OPS // num_ops), _FEWEST_REPLAYS)
    times_ns: list[int] = []
    slowest_s = 0.0
    while len(times_ns) < num_draws and has_time(clock, slowest_s):
        began = time.perf_counter()
        table = perturbed_times(simulation.problem, spread, 1, seed + len(times_ns))
        times_ns.append(mean_step_time_ns(simulation, table))
        slowest_s = max(slowest_s, time.perf_counter() - began)
    if len(times_ns) < _FEWEST_REPLAYS:
        return None
    return NoisyTimes(spread, int(np.mean(times_ns)), int(np.percentile(times_ns, 95, method="higher")), len(times_ns))


def perturbed_times(problem: Problem, spread: float, num_tables: int, seed: int) -> I64:
    """Draws op times [K, N, D] with a relative normal noise of deviation `spread`, the same on all devices of an op.
    Where all devices are alike, they are [K, N, 1]."""
    rng = np.random.default_rng(np.random.SeedSequence([seed, 0x0B057]))
    factors = np.maximum(1.0 + spread * rng.standard_normal((num_tables, problem.num_ops, 1)), 0.1)
    times = problem.simulator.time_table_ns[None]
    tables = np.where(times > 0, np.rint(times * factors).astype(np.int64), times)
    tables.setflags(write=False)  # see `Simulator.time_table_ns`
    return tables


@dataclass(frozen=True, eq=False, kw_only=True)
class SearchTerms:
    """The terms of a search that an answer may depend on besides the budget, whatever the question."""

    seed: int = 0
    checkpoint: str | None = None  # the file of a policy; None: the one that comes with gdp
    num_threads: int | None = None  # None: as many as there are processors
    on_progress: OnProgress | None = None  # told of candidates, better or not, whose figures are true
    settings: Settings = DEFAULTS

    def tell(self, candidate: Candidate) -> None:
        """Reports a candidate to whoever asked."""
        if self.on_progress is not None:
            self.on_progress(candidate)


@dataclass(frozen=True, eq=False)
class Question(SearchTerms):
    """A problem whose N ops are to be placed. It judges placements, of the problem as given or reduced."""

    problem: Problem
    reduction: Reduction  # of `problem`, to the same steps in fewer ops
    bound_ns: int = 0  # no step is faster: a search that reaches it ends
    noise: Noise | None = None  # step times are means over its op times; None: under the problem's own
    starts: Sequence[Candidate] = ()  # of `problem`: searches begin from these too
    known: Sequence[Candidate] = ()  # of `problem`, judged and told of already

    @classmethod
    def about(cls, problem: Problem, **others: object) -> "Question":
        """Returns the question about `problem` with its reduction; `others` are further fields."""
        return replace(cls(problem, reduce(problem)), **others)  # type: ignore[arg-type]

    @property
    def is_large(self) -> bool:
        """True if classical placers and a search take many seconds."""
        return self.problem.num_ops > self.settings.large.slow_ops

    @property
    def simulation_s(self) -> float:
        """The seconds of one simulation of the problem as given."""
        problem, simulator = self.problem, self.problem.simulator
        while simulator.num_timed < 2:  # the first one may have to load compiled code
            simulate(problem, np.argmax(problem.allowed, axis=1))
        return simulator.fastest_s

    def has_time(self, clock: Clock, num_simulations: int) -> bool:
        """Returns whether `clock` has the time that so many simulations take; always, when it counts simulations."""
        is_timed = clock.seconds_left is not None and clock.has(0.0)
        return clock.has(num_simulations * self.simulation_s if is_timed else 0.0)

    def judge(self, simulation: Simulation, order: str | None = None) -> Candidate:
        """Returns the candidate that `simulation`, a step of the problem as given, is; its ops started in `order`."""
        step_time_ns = simulation.step_time_ns
        if self.noise is not None:
            step_time_ns = mean_step_time_ns(simulation, self.noise.original_ns)
        figures = replace(Figures.of(simulation), step_time_ns=step_time_ns)
        return Candidate(simulation.placement, figures, None, order or self.problem.order, simulation)

    def try_orders(
        self, placement: Placement, orders: Sequence[str] | None = None, clock: Clock | None = None
    ) -> Candidate:
        """Returns `placement` [N] of the problem as given in the best of `orders`, by default the problem's. The clock
        may end before the last of them; the problem's own order is always tried, first."""
        problem = self.problem
        best, slowest_s = None, 0.0
        for order in sorted(orders or problem.orders, key=lambda order: order != problem.order):
            if best is not None and not has_time(clock, slowest_s):
                break
            began = time.perf_counter()
            priority = problem.priority(order, problem.b_level_ns)
            candidate = self.judge(simulate(problem, placement, priority=priority), order)
            best = candidate if best is None else min(best, candidate)
            slowest_s = max(slowest_s, time.perf_counter() - began)
        assert best is not None, "a problem has an order"
        return best

    def judge_with_transfers(self, placement: Placement, order: str) -> Candidate:
        """Returns `placement` [N] with ops started in `order` by the longest remaining path, transfers among it. For an
        order by the program that is the order of the same phases without it."""
        order = _WITHOUT_PROGRAM.get(order, order)
        priority = self.problem.priority(order, communication_levels(self.problem, placement))
        return replace(self.judge(simulate(self.problem, placement, priority=priority), order), priority=priority)

    def replay(self, reduced: Candidate) -> Candidate:
        """Returns a candidate of the reduced problem as one of the problem as given, replayed in full."""
        reduction = self.reduction
        found = simulate(reduction.problem, reduced.placement, priority=reduced.priority)
        order = reduction.expand_order(found.order)
        return self.judge(simulate(self.problem, reduction.expand(reduced.placement), order=order), reduced.order)

    def in_order(self, order: str) -> "Question":
        """Returns the same question with placements judged in another order of micro-batches."""
        original, problem = self.problem.in_order(order), self.reduction.problem.in_order(order)
        return replace(self, problem=original, reduction=replace(self.reduction, original=original, problem=problem))

    def unreduced(self) -> "Question":
        """Returns the same question with a reduction that merges nothing."""
        noise = None if self.noise is None else replace(self.noise, reduced_ns=self.noise.original_ns)
        return replace(self, reduction=Reduction.nothing(self.problem), noise=noise)


@dataclass(frozen=True, eq=False)
class BatchQuestion(SearchTerms):
    """A batch that may be cut over devices: a question to layouts, batches in flight and rivals."""

    parts: Parts
    cluster: Cluster
    constraints: Constraints = field(default_factory=Constraints)
    layout: Layout | None = None  # None: any
    num_batches: int = 0  # in flight of a forward pass; 0: one training step is cut
    groups: I64 | None = None  # [N] of the ops of a batch: a server has those of one on one device, in order

    def on_groups(self, shards: Shards) -> "BatchQuestion":
        """Returns the same question about the local program of a rank, on groups of the devices. InputError where the
        model is not cut so, or there is no such group."""
        parts, cluster = self.parts.sharded(shards), self.cluster.grouped(shards.num_ranks)
        parts.exact(1)
        return replace(
            self, parts=parts, cluster=cluster, constraints=self.constraints.on_groups(cluster, self.cluster)
        )

    def about(self, problem: Problem, **others: object) -> Question:
        """Returns the question of how to place the ops of `problem`; `others` are further fields."""
        own = {"seed": self.seed, "checkpoint": self.checkpoint, "num_threads": self.num_threads}
        return Question.about(problem, **own, settings=self.settings, **others)


class Solution(NamedTuple):
    """The best candidate, of the problem as given, and what else was looked at."""

    best: Candidate | None  # None: there is none at all
    baselines: Mapping[str, Baseline] = {}
    num_updates: int = 0  # of a policy that was trained
    looked_at: tuple[Candidate, ...] = ()  # of layouts, the best first
    bound_ns: int = 0  # no layout of the batch takes less
    plan: Plan | None = None  # of the best, where that is asked for
    notes: tuple[str, ...] = ()  # what was not looked at, and why


def plan_of(simulation: Simulation, bound_ns: int, placer: str, seed: int, search: Search | None = None) -> Plan:
    """Returns the plan that `simulation` runs."""
    problem = simulation.problem
    return Plan(
        graph=problem.graph.fingerprint,
        cluster=problem.cluster.fingerprint,
        devices=tuple(device.name for device in problem.cluster.devices),
        placement=simulation.placement,
        order=simulation.order,
        step_time_ns=simulation.step_time_ns,
        peak_memory_bytes=simulation.peak_memory_bytes,
        lower_bound_ns=bound_ns,
        placer=placer,
        seed=seed,
        gdp_version=version("gdp-placement"),
        search=search,
        problem=problem,
    )


def search_record(simulation: Simulation, clock: Clock, order: str, baselines: Mapping[str, Baseline]) -> Search:
    """Returns how the plan that `simulation` runs was found, its ops started in `order`."""
    return Search(
        seconds=clock.seconds,
        simulations=clock.simulations,
        baselines=baselines,
        busy_fraction=simulation.busy_fraction,
        missing_bytes=simulation.missing_bytes,
        interrupted=clock.stop.is_set(),
        order=order,
    )
