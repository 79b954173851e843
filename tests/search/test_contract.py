"""What every solver promises, whatever the problem."""

from dataclasses import replace

import numpy as np
import pytest

from gdp.budget import Budget, Clock
from gdp.placers import CLASSICAL
from gdp.search.ops import auto
from gdp.search.ops.zero_shot import draw_near
from gdp.search.place import place
from gdp.search.question import Question
from gdp.search.settings import OpsSettings, Settings
from gdp.search.solvers import SOLVERS
from gdp.simulator.simulate import verify
from problems import CASES

BUDGET = 300  # simulations
EXACT = ("one device", "seven ops")  # small enough for the exact placer
PAIRS = [(solver, case) for solver in SOLVERS for case in (EXACT if solver == "exact" else CASES)]
TOO_LARGE = {("single", "little memory")}  # no single device holds all


@pytest.mark.parametrize(("solver", "case"), PAIRS)
def test_every_solver_keeps_the_contract(solver: str, case: str) -> None:
    """Its plan is valid, fits if it can, equals its replay, is not below the bound, within the budget, found again."""
    instance = CASES[case]
    plan, again = (
        place(instance.graph(), instance.cluster, placer=solver, budget=f"{BUDGET}sims", seed=3, **instance.constraints)
        for _ in range(2)
    )
    wrong = verify(instance.problem(), plan)
    if (solver, case) in TOO_LARGE:
        assert plan.status == "infeasible"
        assert all(reason.endswith("bytes missing") for reason in wrong)
    else:
        assert (plan.status, wrong) == ("ok", [])
    assert plan.lower_bound_ns <= plan.step_time_ns
    assert plan.search is not None
    assert plan.search.simulations <= BUDGET + len(CLASSICAL)
    assert plan.to_document() == again.to_document()


@pytest.mark.parametrize("case", CASES)
def test_auto_with_the_policy_keeps_the_contract_within_seconds(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan is valid, fits, equals its replay, is not below the bound, and not slower than any baseline.

    With micro-batches no policy is asked.
    """
    settings = Settings(ops=OpsSettings(searched_alone=10**9))  # small problems would have time for a search alone
    asked = []
    monkeypatch.setattr(auto, "draw_near", lambda *args: asked.append(case) or draw_near(*args))
    instance = CASES[case]
    plan = place(instance.graph(), instance.cluster, budget="2s", seed=3, settings=settings, **instance.constraints)
    assert bool(asked) == (instance.problem().microbatch.max() < 1)
    assert plan.search is not None
    assert (plan.status, verify(instance.problem(), plan)) == ("ok", [])
    assert plan.lower_bound_ns <= plan.step_time_ns
    fitting = [found.step_time_ns or 0 for found in plan.search.baselines.values() if found.status == "ok"]
    assert all(plan.step_time_ns <= time_ns for time_ns in fitting)


def test_the_policy_refines_what_is_known_and_ends_where_nothing_is_left() -> None:
    """Its answer is no worse than the best candidate; on one device, and at the bound, it looks at candidates alone."""
    for case in ("equal cards", "one device"):
        question = Question.about(CASES[case].problem())
        placements = (
            np.zeros(question.problem.num_ops, np.int64),
            question.problem.graph.group_index % question.problem.num_devices,
        )
        candidates = [question.try_orders(placement) for placement in placements]
        clock = Clock(Budget(simulations=200))
        known = [question.reduction.restrict(placement) for placement in placements]
        drawn, _ = draw_near(question, clock, known)
        assert drawn.figures <= min(candidates).figures
        assert (clock.simulations == len(candidates)) == (case == "one device")
        reached = Clock(Budget(simulations=200))
        draw_near(replace(question, bound_ns=min(candidates).step_time_ns), reached, known)
        assert reached.simulations == len(candidates)
