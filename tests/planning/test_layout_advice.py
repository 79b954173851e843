"""Advice on layouts: estimates for other machines and batches, on which a step has to fit too."""

from tests.search.test_layouts import BATCH, encoder, machine_of

from gdp.budget import Budget, Clock
from gdp.planning.layout_advice import advise_on_layouts
from gdp.search.layouts.choose import choose_layout
from gdp.search.layouts.parts import Parts
from gdp.simulator.constraints import Constraints


def test_what_does_not_fit_as_it_is_gets_a_layout_that_takes_less_memory() -> None:
    """Three cards on which the batch fits with recomputed layers only; with one less it does so too."""
    parts, cluster = Parts(encoder, BATCH), machine_of([1.0] * 3, memory="24MB")
    choice = choose_layout(parts, cluster, budget="20sims")
    assert choice.trial.layout.recompute != "none" or max(choice.trial.layout.microbatches) > 1
    advice = advise_on_layouts(choice, parts, Constraints(), Clock(Budget.of("2000sims")))
    less = next(each for each in advice.what_ifs if each.change == "one device less")
    assert less.step_time_ns is not None
    assert less.step_time_ns > choice.plan.step_time_ns
