"""Advice on layouts: estimates for other machines and batches, on which a step has to fit too."""

import pytest

from gdp.budget import Budget, Clock
from gdp.parallel.layout import Layout
from gdp.planning.advice import LAYOUTS, Advice, WhatIf
from gdp.planning.layout_advice import advise_on_layouts, estimated_layout
from gdp.report.advice_answer import advice_sentences
from gdp.search.batch_parts import Parts
from gdp.search.place import place
from gdp.simulator.constraints import Constraints
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import replay
from problems import choose
from tests.search.test_layouts import BATCH, encoder, layers, machine_of, parts_of


def test_what_does_not_fit_as_it_is_gets_a_layout_that_takes_less_memory() -> None:
    """Three cards on which the batch fits with recomputed layers only; with one less it does so too."""
    parts, cluster = Parts(encoder, BATCH), machine_of([1.0] * 3, memory="24MB")
    choice = choose(parts, cluster, budget="20sims")
    assert choice.best.layout.recompute != "none" or max(choice.best.layout.microbatches) > 1
    advice, _ = advise_on_layouts(choice, parts, Constraints(), Clock(Budget.of("2000sims")))
    less = next(each for each in advice.what_ifs if each.change == "one device fewer")
    assert less.step_time_ns is not None
    assert less.step_time_ns > choice.plan.step_time_ns


def test_what_a_faster_plan_without_a_device_is_compared_with() -> None:
    """A quarter of the batch is on a card of a tenth of the pace: the plan without it is what twice the batch beats."""
    cluster = machine_of([1.0, 1.0, 1.0, 0.1])
    slow = choose(parts_of(), cluster, budget="20sims", layout=Layout.parse("data=4"))
    advice, better = advise_on_layouts(slow, parts_of(), Constraints(), Clock(Budget.of("2000sims")))
    assert better.plan is advice.plan
    assert advice.plan.step_time_ns < 0.7 * slow.plan.step_time_ns
    twice = next(each for each in advice.what_ifs if each.change == "twice the batch")
    assert twice.step_time_ns is not None
    assert twice.detail.endswith(f" {twice.step_time_ns / advice.plan.step_time_ns / 2:.2f} of the time per sample")


def test_op_placement_is_told_what_a_layout_would_take() -> None:
    """On four equal cards replicas take a quarter of the time that a chain of layers takes; the estimate says so."""
    cluster = machine_of([1.0] * 4)
    clock = Clock(Budget.of("2000sims"))
    told = estimated_layout(parts_of(), cluster, Constraints(), clock)
    assert told is not None
    best = choose(parts_of(), cluster, budget="300sims")
    assert told.step_time_ns == pytest.approx(best.plan.step_time_ns, rel=0.05)
    assert Layout.parse(told.layout).data == 4


@pytest.mark.parametrize(("memory", "share"), [("4MB", 1.0), ("1GB", 0.0)])
def test_nothing_is_told_of_layouts_that_do_not_fit_or_without_time(memory: str, share: float) -> None:
    """No layout is estimated when none fits in memory or no time is left."""
    clock = Clock(Budget.of("2000sims")).part(share)
    assert estimated_layout(parts_of(), machine_of([1.0] * 4, memory=memory), Constraints(), clock) is None


def test_advice_says_how_much_faster_a_layout_is() -> None:
    """A plan of 192 ms beside a layout of 48 ms; a slower layout is not worth a word."""
    plan = place(layers(1), machine_of([1.0] * 2), placer="single")
    simulation = replay(Problem.build(layers(1), machine_of([1.0] * 2)), plan)
    for time_ns, told in ((48 * 10**6, True), (500 * 10**6, False)):
        advice = Advice((WhatIf(LAYOUTS, "", time_ns, "data=4"),), (), True, plan)
        assert (
            list(advice_sentences(advice, simulation))
            == ["--parallel auto: about 48.00 ms, 4 times as fast (data=4, estimated)."] * told
        )
