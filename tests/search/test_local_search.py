"""The local search and what it shares with zero-shot placement: figures, budgets, progress, what is looked at first."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdp.budget import Budget, Clock
from gdp.placers.memory_repair import excess_bytes
from gdp.policy.construction import Constructor
from gdp.policy.pretrained import read_policy
from gdp.search.candidate import Candidate, Figures
from gdp.search.ops.auto import QUICK
from gdp.search.ops.local_search import LocalSearch
from gdp.search.ops.zero_shot import Refiner
from gdp.search.place import Progress, place
from gdp.search.question import Question
from gdp.search.settings import DEFAULTS
from gdp.search.solvers import solve
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import evaluate
from policy.test_scheduler import layered
from strategies import Instance, instances


@settings(max_examples=30)
@given(instances(max_ops=24, keep_groups=True), st.integers(1, 60))
def test_figures_are_true_and_no_worse_than_the_starts_within_the_budget(instance: Instance, budget: int) -> None:
    """Local search obeys all constraints, reports true figures, is no worse than its start, and keeps to its budget."""
    problem = Problem.build(instance.graph, instance.cluster, op_time_ns=instance.op_time_ns)
    starts = [problem.allowed.argmax(axis=1)]
    clock = Clock(Budget(simulations=budget))
    search = LocalSearch(problem, clock)
    search.start([Candidate(start) for start in starts])
    search.run()
    best = search.best
    assert not problem.broken_constraints(best.placement)
    step_time_ns, peaks = evaluate(problem, best.placement, priority=best.priority)
    assert best.figures == Figures(int(excess_bytes(problem, peaks[None])[0]), step_time_ns)
    start_ns, start_peaks = evaluate(problem, starts[0])
    assert best.figures <= Figures(int(excess_bytes(problem, start_peaks[None])[0]), start_ns)
    assert clock.simulations <= max(budget, 1) + len(starts)


def test_refinements_differ_from_the_incumbent_and_improve_a_bad_one() -> None:
    """A refiner proposes distinct placements, and at least one is faster than a random incumbent."""
    problem = layered(num_devices=3)
    rng = np.random.default_rng(0)
    incumbent = rng.integers(0, 3, problem.num_ops)
    constructor = read_policy()
    assert isinstance(constructor, Constructor)
    refiner = Refiner(problem, constructor, DEFAULTS.policy.refinement_units)
    start_ns = evaluate(problem, incumbent)[0]
    times = []
    for _ in range(6):
        placements = refiner.propose(incumbent, 4, rng)
        assert 1 <= len(placements) <= 4
        assert len(np.unique(placements, axis=0)) == len(placements)
        times += [evaluate(problem, placement)[0] for placement in placements]
    assert min(times) < start_ns


def test_a_short_budget_skips_slow_placers_and_says_so() -> None:
    """Only the quick placers run when the clock is up at once; with simulations for a budget all run."""
    question = Question.about(layered())
    short = solve("auto", question, Clock(Budget(seconds=0.0)))
    assert {name for name, found in short.baselines.items() if found.status != "skipped"} == set(QUICK)
    counted = solve("auto", question, Clock(Budget(simulations=100)))
    assert "skipped" not in {found.status for found in counted.baselines.values()}


@pytest.mark.parametrize("placer", ["auto", "local-search", "gdp-zero-shot"])
def test_one_seed_gives_one_answer_on_any_number_of_threads(placer: str) -> None:
    """One seed gives the same figures and the same number of simulations on one thread and on two."""
    clocks = [Clock(Budget(simulations=3000)) for _ in range(3)]
    problem = layered(num_layers=12, num_devices=4)
    solutions = [
        solve(placer, Question.about(problem, seed=3, num_threads=threads), clock)
        for threads, clock in zip((1, 2, 1), clocks, strict=True)
    ]
    assert len({solution.best.figures for solution in solutions if solution.best is not None}) == 1
    assert len({clock.simulations for clock in clocks}) == 1


def test_progress_only_improves_and_counts_all_simulations() -> None:
    """Reported progress never gets worse, and its count of simulations never falls or exceeds the plan's."""
    seen: list[Progress] = []
    problem = layered(num_layers=12, num_devices=4)
    plan = place(problem.graph, problem.cluster, budget="2000sims", on_progress=seen.append)
    keys = [(not progress.feasible, progress.step_time_ns) for progress in seen]
    assert keys == sorted(keys, reverse=True)
    assert [progress.simulations for progress in seen] == sorted(progress.simulations for progress in seen)
    assert plan.search is not None
    assert seen[-1].simulations <= plan.search.simulations
