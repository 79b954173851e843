"""The methods that benchmarks compare.

With a budget in time they run on one thread by processor time, so that a busy machine does not change who wins.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.comparison import best_baselines
from benchmarks.gdp_policy.paper_policy import paper_policy
from benchmarks.gdp_policy.training import train_published
from benchmarks.graphs import lstm_training_graph
from benchmarks.hdp import hdp as place_by_hdp
from benchmarks.runs import Method, WorkloadRuns
from gdp import files
from gdp.bounds.lower_bound import lower_bound
from gdp.budget import Budget, Clock
from gdp.cluster import Cluster
from gdp.placers import CLASSICAL
from gdp.placers.metis import Partitioner
from gdp.placers.settings import METIS
from gdp.planning.warm_up import warm_up as compile_search
from gdp.policy.checkpoint import load_checkpoint, new_policy
from gdp.policy.scheduler import one_thread
from gdp.search.ops.classical import ClassicalRuns
from gdp.search.ops.fine_tune import FineTuneConfig, fine_tune
from gdp.search.ops.zero_shot import ZeroShotConfig
from gdp.search.ops.zero_shot import zero_shot as place_at_once
from gdp.search.question import Noise, Question, Solution
from gdp.search.settings import DEFAULTS
from gdp.search.solvers import solve
from gdp.simulator.plan import Baseline
from gdp.simulator.problem import Placement, Problem
from gdp.simulator.simulate import simulate
from gdp.units.units import Units, forward_units

_DRAWN_FIRST = ZeroShotConfig()  # of training from scratch: few simulations before the first update


def zero_shot(checkpoint: Path, *, name: str = "zero-shot") -> Method:
    """Returns the method that asks the policy without training."""

    def run(question: Question, clock: Clock) -> Solution:
        with one_thread():
            return place_at_once(question, clock, constructor=load_checkpoint(checkpoint).constructor)

    return Method(
        name, run, Budget(simulations=DEFAULTS.policy.most_simulations), settings={"policy": files.digest(checkpoint)}
    )


def fine_tuned(checkpoint: Path, budget: Budget, *, max_updates: int | None = None) -> Method:
    """Returns the method that trains the policy further on the graph at hand."""
    settings = {"policy": files.digest(checkpoint), "max_updates": max_updates or 0}

    def run(question: Question, clock: Clock) -> Solution:
        config = FineTuneConfig(max_updates=max_updates)
        return fine_tune(question, clock, policy=load_checkpoint(checkpoint), config=config)

    return Method("fine-tuned", run, budget, counts_cpu=True, num_threads=1, settings=settings)


def from_scratch(budget: Budget) -> Method:
    """Returns GDP-one: the default policy, untrained, on the graph at hand."""

    def run(question: Question, clock: Clock) -> Solution:
        policy = new_policy("default", seed=question.seed)
        return fine_tune(question, clock, policy=policy, config=FineTuneConfig(zero_shot=_DRAWN_FIRST))

    return Method("gdp-one", run, budget, counts_cpu=True, num_threads=1)


def published(budget: Budget, *, has_own_reward: bool = True, **changes: Any) -> Method:
    """Returns GDP-one as published: the `paper` policy, untrained, with the paper's reward and advantage.

    `changes` are those of the policy's configuration.
    """

    def run(question: Question, clock: Clock) -> Solution:
        return train_published(question, clock, paper_policy(question.seed, **changes), has_own_reward=has_own_reward)

    return Method("gdp-published", run, budget, counts_cpu=True, num_threads=1)


def published_by_module(budget: Budget) -> Method:
    """Returns GDP-one as published, but with one choice for each module, its backward pass and updates with it."""

    def run(question: Question, clock: Clock) -> Solution:
        problem = by_module(question.problem)
        asked = Question.about(problem, seed=question.seed, num_threads=1, on_progress=question.on_progress)
        return published(budget).run(asked, clock)

    return Method("gdp-by-module", run, budget, counts_cpu=True, num_threads=1)


def by_module(problem: Problem) -> Problem:
    """Returns `problem` with one choice for each module: its ops, their backward ops and updates are a group."""
    units = Units.of(problem, forward_units(problem))
    numbers = {module: number for number, module in enumerate(dict.fromkeys(problem.graph.modules))}
    modules = np.array([numbers[problem.graph.modules[op]] for op in units.first_op.tolist()])
    graph = replace(problem.graph, groups=np.unique(modules, return_inverse=True)[1][units.index])
    return Problem.build(graph, problem.cluster)


def hdp(budget: Budget) -> Method:
    """Returns HDP, the learned baseline."""

    def run(question: Question, clock: Clock) -> Solution:
        with one_thread():
            return place_by_hdp(question, clock)

    return Method("hdp", run, budget, counts_cpu=True)


def plain_search(budget: Budget) -> Method:
    """Returns classical placers and the search, without a policy.

    On one thread: the search plans ahead by its clock, and with several the processor's runs faster than the wall's.
    """

    def run(question: Question, clock: Clock) -> Solution:
        return solve("auto", question, clock)

    return Method("search", run, budget, counts_cpu=True, num_threads=1)


def auto(budget: Budget, *, counts_cpu: bool = True, name: str = "auto") -> Method:
    """Returns the default of `gdp place`, noise included: on one thread by processor time, or on all by the wall's."""

    def run(question: Question, clock: Clock) -> Solution:
        noise = Noise.draw(question.reduction, DEFAULTS.noise.spread, DEFAULTS.noise.num_tables, question.seed)
        bound_ns = lower_bound(question.problem)
        return solve("auto", replace(question, noise=noise, bound_ns=bound_ns), clock)

    num_threads = 1 if counts_cpu else None
    return Method(name, run, budget, counts_cpu, num_threads, settings={"noise": DEFAULTS.noise.spread})


def classical() -> Method:
    """Returns every classical placer; the best one's answer."""

    def run(question: Question, clock: Clock) -> Solution:
        runs = ClassicalRuns(question)
        runs.run(tuple(CLASSICAL), clock)
        return Solution(runs.best, runs.baselines)

    return Method("classical", run, Budget(simulations=len(CLASSICAL)))


def classical_baselines(runs: WorkloadRuns, seeds: int) -> dict[str, Baseline]:
    """Returns the best run of each classical placer over the seeds."""
    return best_baselines([runs.run(classical(), seed).baselines for seed in range(seeds)])


def metis_blind(problem: Problem, seed: int) -> Placement:
    """Partitions as the placement papers do: once, k-way, with the default imbalance, blind to memory."""
    if problem.num_devices == 1:
        return np.zeros(problem.num_ops, np.int64)
    return Partitioner(problem).partition(np.arange(problem.num_devices), METIS.imbalances[0], False, seed)


def blind_metis() -> Method:
    """Returns METIS as the placement papers use it."""

    def run(question: Question, clock: Clock) -> Solution:
        placement = metis_blind(question.problem, question.seed)
        clock.spend(1)
        return Solution(question.judge(simulate(question.problem, placement)))

    return Method("metis-blind", run, Budget(simulations=1))


def warm_up() -> None:
    """Compiles all methods, and has PyTorch import its late parts, before anything is timed."""
    compile_search(("gdp-zero-shot", "exact"))
    problem = Problem.build(lstm_training_graph(2), Cluster.parse("2xp100-pcie-16g"))
    question, clock = Question.about(problem, num_threads=1), Clock(Budget(simulations=100))
    fine_tune(question, clock, policy=new_policy("default"), config=FineTuneConfig(max_updates=1))
