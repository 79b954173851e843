"""What every solver promises, whatever the problem."""

import pytest

from gdp.placers import CLASSICAL
from gdp.policy.pretrained import shipped
from gdp.search.ops import auto
from gdp.search.ops.zero_shot import zero_shot
from gdp.search.place import place
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
def test_auto_with_a_policy_of_ones_own_keeps_the_contract(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan is valid, fits, equals its replay, is not below the bound, and not slower than any baseline."""
    asked = []
    monkeypatch.setattr(auto, "zero_shot", lambda *args: asked.append(case) or zero_shot(*args))
    instance, asks = CASES[case], {"budget": "200sims", "seed": 3, "checkpoint": shipped()}
    plan = place(instance.graph(), instance.cluster, **asks, **instance.constraints)
    assert asked
    assert plan.search is not None
    assert (plan.status, verify(instance.problem(), plan)) == ("ok", [])
    assert plan.lower_bound_ns <= plan.step_time_ns
    fitting = [found.step_time_ns or 0 for found in plan.search.baselines.values() if found.status == "ok"]
    assert all(plan.step_time_ns <= time_ns for time_ns in fitting)
