"""Placers that ask a policy: at once (zero-shot), after training on the graph at hand (fine-tuned), or from scratch.

    construct   several groupings, a few placements drawn of each             |  a fixed, small number
    refine      units of the best one choose again, in groupings within it    |  of simulations
    train       PPO on more of both, until the clock is up                    |  fine-tuning only

The simulator scores what the policy draws; the best placement that fits is the answer. N ops of the problem given (best
a reduced one), S samples.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files

import numpy as np
import torch

from gdp.budget import Clock
from gdp.graph import I64
from gdp.placers.local_search import Incumbent
from gdp.placers.memory_repair import excess_bytes, fit_memory
from gdp.policy.base import Instance, Policy
from gdp.policy.checkpoint import load_checkpoint, new_policy
from gdp.policy.ppo import PPOConfig, draw_trials, improve
from gdp.policy.scheduler import SchedulerPolicy
from gdp.problem import Placement, Problem
from gdp.simulate import Simulation, evaluate, evaluate_many, simulate

OnProgress = Callable[[Incumbent, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroShotConfig:
    """How the simulations are spent; repairing what does not fit comes on top."""

    num_simulations: int = 64
    num_constructed: int = 24  # of them on new placements, the others refine the best one
    per_grouping: int = 6  # of a construction: the likeliest placement and drawn ones
    per_round: int = 8  # of a refinement, which then goes on from the best one
    construction_units: tuple[int, ...] = (100, 200)  # in turn, with backward ops following and not
    refinement_units: tuple[int, ...] = (50, 100, 200, 400)  # in turn
    temperature: float = 0.7  # of what is drawn in a construction

    def __post_init__(self) -> None:
        counts = (self.num_constructed, self.per_grouping, self.per_round)
        if min(counts) < 1 or max(counts) > self.num_simulations:
            raise ValueError(f"{self}: counts from 1 to num_simulations are expected")
        if not self.construction_units or not self.refinement_units:
            raise ValueError(f"{self}: some numbers of units are expected")


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuneConfig:
    """Training on one graph."""

    learning_rate: float = 1e-3
    num_samples: int = 16  # placements of an update
    constructing: float = 0.3  # share of the updates that construct, the others refine the best placement
    max_updates: int | None = None
    ppo: PPOConfig = field(default_factory=lambda: PPOConfig(num_epochs=2, entropy_weight=0.003))
    zero_shot: ZeroShotConfig = field(default_factory=ZeroShotConfig)


@dataclass(frozen=True, eq=False)
class Answer:
    """What a learned placer found."""

    incumbent: Incumbent
    num_simulations: int
    num_updates: int = 0
    curve: tuple[tuple[float, int, int], ...] = ()  # (seconds, simulations, step time in ns) at each gain that fits


@dataclass(eq=False)
class _Best:
    """The best placement so far, and how it came."""

    problem: Problem
    clock: Clock
    on_progress: OnProgress | None
    num_simulations: int = 0
    curve: list[tuple[float, int, int]] = field(default_factory=list)
    incumbent: Incumbent | None = None
    _simulation: Simulation | None = None

    @property
    def simulation(self) -> Simulation:
        """The best placement's, in full."""
        assert self.incumbent is not None
        if self._simulation is None:
            self._simulation = simulate(self.problem, self.incumbent.placement)
            self.num_simulations += 1
        return self._simulation

    @property
    def left(self) -> bool:
        """Whether there is time, and a simulation to spend."""
        limit = self.clock.budget.simulations
        within = limit is None or self.num_simulations < limit
        return within and not self.clock.stop.is_set() and self.clock.seconds_left != 0.0

    def look(self, placements: I64, step_time_ns: I64, peak_memory_bytes: I64) -> None:
        """Count simulated `placements` [S, N], and keep the best."""
        self.num_simulations += len(placements)
        excess = excess_bytes(self.problem, peak_memory_bytes)
        first = int(np.lexsort((step_time_ns, excess))[0])
        found = Incumbent(placements[first], int(step_time_ns[first]), int(excess[first]))
        if self.incumbent is not None and found.key >= self.incumbent.key:
            return
        self.incumbent, self._simulation = found, None
        if found.excess_bytes == 0:
            self.curve.append((self.clock.seconds, self.num_simulations, found.step_time_ns))
        if self.on_progress:
            self.on_progress(found, self.num_simulations)

    def answer(self, num_updates: int = 0) -> Answer:
        """What was found; repaired if nothing fitted."""
        assert self.incumbent is not None
        if self.incumbent.excess_bytes > 0:
            placement = fit_memory(self.problem, self.incumbent.placement)
            step_time_ns, peaks = evaluate(self.problem, placement)
            self.look(placement[None], np.array([step_time_ns]), peaks[None])
        return Answer(self.incumbent, self.num_simulations, num_updates, tuple(self.curve))


def zero_shot(
    problem: Problem,
    policy: Policy,
    clock: Clock,
    *,
    seed: int = 0,
    config: ZeroShotConfig | None = None,
    num_threads: int | None = None,
    on_progress: OnProgress | None = None,
) -> Answer:
    """The best of a few placements that `policy` draws; it is not changed. Ends early when the clock is up."""
    best = _Best(problem, clock, on_progress)
    _at_once(best, policy, np.random.default_rng(seed), config or ZeroShotConfig(), num_threads)
    return best.answer()


def constructions(problem: Problem, policy: SchedulerPolicy, *, seed: int, config: ZeroShotConfig) -> list[Placement]:
    """`config.num_constructed` placements [N] that `policy` constructs, not simulated: starts for a search."""
    rng = np.random.default_rng(seed)
    return [placement for batch in _constructions(problem, policy, rng, config) for placement in batch]


def fine_tune(
    problem: Problem,
    policy: Policy,
    clock: Clock,
    *,
    seed: int = 0,
    config: FineTuneConfig | None = None,
    num_threads: int | None = None,
    on_progress: OnProgress | None = None,
) -> Answer:
    """The best placement seen while `policy` (changed in place) trains on `problem` until the clock is up.

    A budget in simulations makes it reproducible.
    """
    config = config or FineTuneConfig()
    rng = np.random.default_rng(np.random.SeedSequence([seed, 0xF17E]))
    best = _Best(problem, clock, on_progress)
    _at_once(best, policy, rng, config.zero_shot, num_threads)
    assert best.incumbent is not None
    reference_ns = best.incumbent.step_time_ns
    optimizer = torch.optim.Adam(policy.parameters(), lr=config.learning_rate)
    earlier: list[float] = []  # mean reward of each update
    while best.left and len(earlier) != config.max_updates:
        constructs = rng.random() < config.constructing
        instance = _instance(best, policy, rng, None if constructs else best.simulation)
        trials = draw_trials(
            policy, instance, config.num_samples, rng, config.ppo, reference_ns, num_threads=num_threads
        )
        best.look(trials.rollouts.placements, trials.step_time_ns, trials.peak_memory_bytes)
        baseline = float(np.mean(earlier)) if config.ppo.baseline == "history" and earlier else None
        improve(policy, optimizer, [trials], config.ppo, baselines=[baseline])
        earlier.append(float(trials.rewards.mean()))
    return best.answer(len(earlier))


def _instance(best: _Best, policy: Policy, rng: np.random.Generator, incumbent: Simulation | None) -> Instance:
    """What to train on next; policies that do not refine always construct."""
    if not isinstance(policy, SchedulerPolicy):
        return policy.instance(best.problem, rng)
    config = ZeroShotConfig()
    sizes = config.construction_units if incumbent is None else config.refinement_units
    return policy.grouped(best.problem, int(rng.choice(np.array(sizes))), rng, incumbent=incumbent)


def _constructions(problem: Problem, policy: Policy, rng: np.random.Generator, config: ZeroShotConfig) -> Iterator[I64]:
    """Placements [at most per_grouping, N], num_constructed in all."""
    for number, begin in enumerate(range(0, config.num_constructed, config.per_grouping)):
        count = min(config.per_grouping, config.num_constructed - begin)
        if isinstance(policy, SchedulerPolicy):
            size = config.construction_units[number // 2 % len(config.construction_units)]
            instance: Instance = policy.grouped(problem, size, rng, following=number % 2 == 0)
        else:
            instance = policy.instance(problem, rng)
        batch = [policy.sample(instance, 1, rng, temperature=0.0).placements]
        if count > 1:
            batch.append(policy.sample(instance, count - 1, rng, temperature=config.temperature).placements)
        yield np.concatenate(batch)


def _at_once(
    best: _Best, policy: Policy, rng: np.random.Generator, config: ZeroShotConfig, num_threads: int | None
) -> None:
    """Let `best` look at what the policy constructs and refines."""
    problem = best.problem
    for placements in _constructions(problem, policy, rng, config):
        best.look(placements, *evaluate_many(problem, placements, num_threads=num_threads))
        if not best.left:
            return
    number = 0
    while best.left and best.num_simulations < config.num_simulations:
        if isinstance(policy, SchedulerPolicy):
            size = config.refinement_units[number % len(config.refinement_units)]
            instance: Instance = policy.grouped(problem, size, rng, incumbent=best.simulation)
        else:
            instance = policy.instance(problem, rng)
        count = max(min(config.per_round, config.num_simulations - best.num_simulations), 1)
        placements = policy.sample(instance, count, rng).placements
        best.look(placements, *evaluate_many(problem, placements, num_threads=num_threads))
        number += 1


def ask(
    name: str,
    problem: Problem,
    clock: Clock,
    *,
    seed: int = 0,
    checkpoint: str | None = None,
    num_threads: int | None = None,
    on_progress: OnProgress | None = None,
) -> Answer:
    """What the learned placer called `name` answers: `gdp-zero-shot` and `gdp-finetune` begin with the policy in the
    file `checkpoint` (None: the one that comes with gdp), `gdp-one` with an untrained one.

    Raises InputError for a bad checkpoint.
    """
    policy = new_policy("default", seed=seed) if name == "gdp-one" else load_checkpoint(checkpoint or shipped())
    run = zero_shot if name == "gdp-zero-shot" else fine_tune
    with one_thread():
        return run(problem, policy, clock, seed=seed, num_threads=num_threads, on_progress=on_progress)


def shipped() -> str:
    """The file of the policy that comes with gdp."""
    return str(files("gdp.policy") / "default.safetensors")


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch on one thread: the networks are small, and the processors have simulations to do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
