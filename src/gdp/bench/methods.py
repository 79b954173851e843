"""The methods that the benchmarks of the learned policy compare.

What has a budget in time runs on one thread by processor time, so that a busy machine does not change who wins.
"""

import hashlib
from pathlib import Path

from gdp import files
from gdp.bench.graphs import lstm_training_graph
from gdp.bench.runs import Method, Outcome
from gdp.bounds import lower_bound
from gdp.budget import Budget, Clock
from gdp.cluster import Cluster
from gdp.coarsen import Reduction, reduce
from gdp.place import NUM_PERTURBATIONS
from gdp.placers import CLASSICAL, learned, metis_blind
from gdp.placers.classical_runs import ClassicalRuns
from gdp.placers.noise import DEFAULT_NOISE, Noise
from gdp.placers.portfolio import expand, find
from gdp.policy.base import Policy
from gdp.policy.checkpoint import load_checkpoint, new_policy
from gdp.policy.ppo import PAPER
from gdp.problem import Problem
from gdp.simulate import simulate
from gdp.warmup import warm_up as compile_search

ZERO_SHOT_SIMULATIONS = 64  # the limit


def zero_shot(checkpoint: Path, *, name: str = "zero-shot") -> Method:
    """The policy's answer without training."""
    config = learned.ZeroShotConfig(num_simulations=ZERO_SHOT_SIMULATIONS)

    def run(reduction: Reduction, clock: Clock, seed: int) -> Outcome:
        with learned.one_thread():
            policy = load_checkpoint(checkpoint)
            return _outcome(reduction, learned.zero_shot(reduction.problem, policy, clock, seed=seed, config=config))

    return Method(name, run, Budget(simulations=ZERO_SHOT_SIMULATIONS), settings={"policy": _digest(checkpoint)})


def fine_tuned(checkpoint: Path, budget: Budget, *, max_updates: int | None = None) -> Method:
    """The policy's answer after training on the graph at hand."""
    settings: dict[str, str | int | float] = {"policy": _digest(checkpoint), "max_updates": max_updates or 0}

    def run(reduction: Reduction, clock: Clock, seed: int) -> Outcome:
        config = learned.FineTuneConfig(max_updates=max_updates)
        return _train(reduction, load_checkpoint(checkpoint), clock, seed, config)

    return Method("fine-tuned", run, budget, counts_cpu=True, settings=settings)


def from_scratch(budget: Budget) -> Method:
    """GDP-one: the default policy, untrained, on the graph at hand."""

    def run(reduction: Reduction, clock: Clock, seed: int) -> Outcome:
        return _train(reduction, new_policy("default", seed=seed), clock, seed, learned.FineTuneConfig())

    return Method("gdp-one", run, budget, counts_cpu=True)


def published(budget: Budget) -> Method:
    """GDP-one as published: the `paper` policy, untrained, with the paper's reward and advantage."""

    def run(reduction: Reduction, clock: Clock, seed: int) -> Outcome:
        return _train(reduction, new_policy("paper", seed=seed), clock, seed, learned.FineTuneConfig(ppo=PAPER))

    return Method("gdp-published", run, budget, counts_cpu=True)


def hdp(cpu_seconds: float) -> Method:
    """The learned baseline, for so much processor time."""

    def run(reduction: Reduction, clock: Clock, seed: int) -> Outcome:
        with learned.one_thread():
            found = find(reduction, "hdp", clock, seed=seed)
        return Outcome(found.best, found.simulations)

    return Method("hdp", run, Budget(seconds=cpu_seconds), counts_cpu=True)


def plain_search(cpu_seconds: float) -> Method:
    """Classical placers and the search, without a policy, for so much processor time.

    On one thread: the search plans ahead by its clock, and with several the processor's runs faster than the wall's.
    """

    def run(reduction: Reduction, clock: Clock, seed: int) -> Outcome:
        found = find(reduction, "auto", clock, seed=seed, num_threads=1)
        return Outcome(found.best, found.simulations)

    return Method("search", run, Budget(seconds=cpu_seconds), counts_cpu=True)


def auto(cpu_seconds: float) -> Method:
    """What `gdp place` does by default, noise included, for so much processor time on one thread."""

    def run(reduction: Reduction, clock: Clock, seed: int) -> Outcome:
        noise = Noise.draw(reduction, DEFAULT_NOISE, NUM_PERTURBATIONS, seed)
        bound_ns = lower_bound(reduction.original)
        found = find(reduction, "auto", clock, seed=seed, bound_ns=bound_ns, noise=noise, num_threads=1)
        return Outcome(found.best, found.simulations)

    return Method("auto", run, Budget(seconds=cpu_seconds), counts_cpu=True, settings={"noise": DEFAULT_NOISE})


def classical() -> Method:
    """Every classical placer; the best one's answer."""

    def run(reduction: Reduction, clock: Clock, seed: int) -> Outcome:
        runs = ClassicalRuns(reduction.original, clock, seed)
        runs.run(tuple(CLASSICAL))
        return Outcome(
            None if runs.best is None else runs.best.simulation, len(runs.candidates), baselines=runs.baselines
        )

    return Method("classical", run, Budget(simulations=len(CLASSICAL)))


def blind_metis() -> Method:
    """METIS as the placement papers use it."""

    def run(reduction: Reduction, clock: Clock, seed: int) -> Outcome:
        placement = metis_blind(reduction.original, seed)
        return Outcome(None if placement is None else simulate(reduction.original, placement), 1)

    return Method("metis-blind", run, Budget(simulations=1))


def warm_up() -> None:
    """Compile, and import what PyTorch imports late, before anything is timed."""
    compile_search()
    problem = Problem.build(lstm_training_graph(2), Cluster.parse("2xp100-pcie-16g"))
    config = learned.FineTuneConfig(max_updates=1)
    _train(reduce(problem), new_policy("default"), Clock(Budget(simulations=100)), 0, config)


def _train(reduction: Reduction, policy: Policy, clock: Clock, seed: int, config: learned.FineTuneConfig) -> Outcome:
    with learned.one_thread():
        answer = learned.fine_tune(reduction.problem, policy, clock, seed=seed, config=config, num_threads=1)
        return _outcome(reduction, answer)


def _outcome(reduction: Reduction, answer: learned.Answer) -> Outcome:
    return Outcome(expand(reduction, answer.incumbent), answer.num_simulations, answer.num_updates)


def _digest(path: Path) -> str:
    return hashlib.sha256(files.read_bytes(path)).hexdigest()
