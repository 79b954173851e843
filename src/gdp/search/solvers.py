"""The solvers by name: all that `--placer` takes. A new one is a file and a row here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from gdp.budget import Clock
from gdp.cluster import MAX_DEVICES, WORD_DEVICES
from gdp.errors import InputError
from gdp.placers import CLASSICAL
from gdp.placers.exact import exact
from gdp.search.ops.auto import auto, local_search
from gdp.search.ops.classical import ClassicalRuns
from gdp.search.ops.good_order import in_good_order
from gdp.search.ops.zero_shot import zero_shot
from gdp.search.question import Question, Solution
from gdp.simulator.simulate import simulate


@dataclass(frozen=True, slots=True)
class Solver:
    """A way to answer a question within a budget."""

    solve: Callable[[Question, Clock], Solution]
    under_noise: bool = True  # it can average step times over perturbed op times
    searches: bool = False  # it looks for plans that are fast on average by default
    is_learned: bool = False  # its placements are a policy's
    takes_checkpoint: bool = False
    most_devices: int = MAX_DEVICES
    prepare: Callable[[], object] = lambda: None  # imports what takes seconds, before a clock runs


def solver_of(name: str) -> Solver:
    """Returns the solver called `name`; InputError lists all."""
    if name == "hdp":
        raise InputError(
            "placer 'hdp' trains a policy of its own for each graph, which takes hours at the size of its paper; "
            "python -m benchmarks paper runs it beside the others"
        )
    if name not in SOLVERS:
        raise InputError(f"placer {name!r} is unknown; one of {', '.join(SOLVERS)} is expected")
    return SOLVERS[name]


def solve(name: str, question: Question, clock: Clock) -> Solution:
    """Returns what the solver called `name` answers; InputError for an unknown name, or noise that it cannot take."""
    solver = solver_of(name)
    if question.noise is not None and not solver.under_noise:
        raise InputError(f"robust: {name} knows one set of costs only; use another placer")
    if question.problem.num_devices > solver.most_devices:
        raise InputError(
            f"placer {name!r} places on up to {solver.most_devices} devices, and there are "
            f"{question.problem.num_devices}; use auto"
        )
    return solver.solve(in_good_order(question, clock), clock)


def _run_classical(name: str, question: Question, clock: Clock) -> Solution:
    runs = ClassicalRuns(question)
    runs.run((name,), clock)
    return Solution(runs.best)


def _place_exactly(question: Question, clock: Clock) -> Solution:
    """Returns the exact placer's answer; when nothing fits, that of a single device, which says what is missing."""
    problem = question.problem
    answer = exact(problem, time_limit_s=clock.seconds_left, max_nodes=clock.simulations_left, stop=clock.stop)
    clock.spend(answer.num_nodes)
    placement = CLASSICAL["single"](problem, 0) if answer.placement is None else answer.placement
    return Solution(None if placement is None else question.judge(simulate(problem, placement)))


def _fine_tune(question: Question, clock: Clock) -> Solution:
    return _load_fine_tune()(question, clock)


def _load_fine_tune() -> Callable[[Question, Clock], Solution]:
    import torch

    from gdp.search.ops.fine_tune import fine_tune  # needs PyTorch, which takes seconds to import

    torch.optim.Adam([torch.zeros(1, requires_grad=True)])  # the first optimizer imports for seconds, too
    return fine_tune


_LEARNED: Any = {"under_noise": False, "is_learned": True, "takes_checkpoint": True, "most_devices": WORD_DEVICES}

SOLVERS: Mapping[str, Solver] = MappingProxyType(
    {
        "auto": Solver(auto, searches=True, takes_checkpoint=True),
        "local-search": Solver(local_search, searches=True),
        "exact": Solver(_place_exactly, under_noise=False, most_devices=WORD_DEVICES),
        "gdp-zero-shot": Solver(zero_shot, **_LEARNED),
        "gdp-finetune": Solver(_fine_tune, **_LEARNED, prepare=_load_fine_tune),
        **{name: Solver(partial(_run_classical, name)) for name in CLASSICAL},
    }
)
