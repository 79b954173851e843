"""The promises of every layout, whatever the machine."""

import numpy as np
import pytest

from gdp.budget import Budget, Clock
from gdp.cluster import Cluster
from gdp.graph import Graph
from gdp.parallel.layout import NONE, Layout
from gdp.parallel.step import Step
from gdp.search.batch_parts import Parts
from gdp.search.place import place
from gdp.search.question import BatchQuestion
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import replay, verify
from problems import choose
from tests.search.test_layouts import BATCH, encoder, layers, machine_of

BUDGET = 60  # simulations
MACHINES = {
    "four alike": machine_of([1.0] * 4),
    "unlike": machine_of([3.0, 1.0, 1.0]),
    "slow links": machine_of([1.0] * 4, bandwidth="1GB/s"),
    "little memory": machine_of([1.0] * 4, memory="40MB"),
    "a CPU beside": Cluster.parse("2xl4-24g+cpu-16core"),
}
LAYOUTS = (
    "auto",
    "none",
    "data=2",
    "data=2,microbatches=2,zero=1",
    "data=2,zero=2",
    "data=2,zero=3",
    "microbatches=4,stages=2",
    "data=2,recompute=auto",
)
STEPS = {"layers": layers, "encoder": encoder}
CASES = [
    (layout, machine, step)
    for layout in LAYOUTS
    for machine in MACHINES
    for step in STEPS
    if "stages" not in layout or step == "layers"  # the encoder is not a chain
]
OF_LAYERS = {"four alike", "slow links"}  # the encoder is placed on the other machines, but for a long run
OFFLOADED = [("data=2,offload=auto", "a CPU beside", step) for step in STEPS]
REPEATED = {("layers", "unlike"), ("encoder", "a CPU beside")}  # placed twice, with each layout


@pytest.mark.parametrize(
    ("layout", "machine", "step"),
    [
        pytest.param(*case, marks=[pytest.mark.long] * (case[2] == "encoder" and case[1] in OF_LAYERS))
        for case in (*CASES, *OFFLOADED)
    ],
)
def test_every_layout_keeps_the_contract(layout: str, machine: str, step: str) -> None:
    """Its plan is valid, fits where it can, is found again, equals its replay, keeps bounds, and conserves the work."""
    parts, cluster = Parts(STEPS[step], BATCH), MACHINES[machine]
    clock = Clock(Budget(simulations=BUDGET))
    plan = place(parts, cluster, parallel=layout, budget=clock, seed=3, robust=0.0)
    if layout == "auto" or (step, machine) in REPEATED:
        again = place(Parts(STEPS[step], BATCH), cluster, parallel=layout, budget=f"{BUDGET}sims", seed=3, robust=0.0)
        assert plan.to_document() == again.to_document()
    assert clock.simulations <= 3 * BUDGET  # the first of each phase is always made
    problem = problem_of(parts, cluster, plan.layout)
    wrong = verify(problem, plan)
    if machine == "little memory" and layout != "auto":
        assert all(reason.endswith("bytes missing") for reason in wrong)
    else:
        assert (plan.status, wrong) == ("ok", [])
    assert plan.lower_bound_ns <= plan.step_time_ns == replay(problem, plan).step_time_ns
    if plan.layout is not None:
        assert_conserved(parts.exact(1), problem.graph, Layout.of_document(plan.layout))


def problem_of(parts: Parts, cluster: Cluster, document: object) -> Problem:
    """Returns the problem that a plan with this layout solves, cut anew."""
    graph = parts.exact(1) if document is None else Step.of_document(parts.exact, document).graph  # type: ignore[arg-type]
    return Problem.build(graph, cluster)


def assert_conserved(whole: Graph, cut: Graph, layout: Layout) -> None:
    """Asserts that the passes have the flops of the whole batch, and weights are there once a replica, or in pieces."""
    flops = [int(graph.flops[graph.is_in_phase("backward")].sum()) for graph in (whole, cut)]
    if layout.recompute == NONE:
        assert abs(flops[1] - flops[0]) <= 0.05 * flops[0]
    held = [int(graph.resident_bytes.sum()) for graph in (whole, cut)]
    assert held[1] <= layout.data * held[0] * 1.01
    if layout.zero == 0:
        assert held[1] == layout.data * held[0]


@pytest.mark.parametrize("machine", MACHINES)
def test_the_choice_is_no_slower_than_what_was_looked_at(machine: str) -> None:
    """The answer is the best of the candidates; forced, its layout is as fast; no candidate is below the bound."""
    parts, cluster = Parts(layers, BATCH), MACHINES[machine]
    solution = choose(parts, cluster, budget="500sims")
    fitting = [each for each in solution.looked_at if each.simulation is not None and each.fits]
    assert min(fitting).step_time_ns == solution.best.step_time_ns
    assert all(solution.bound_ns <= each.step_time_ns for each in fitting)
    forced = choose(parts, cluster, layout=solution.best.layout, budget="500sims")
    assert forced.best.step_time_ns <= 1.01 * solution.best.step_time_ns


def test_questions_say_what_is_asked() -> None:
    """A question about a batch asks of ops with its own seed, policy and settings."""
    asked = BatchQuestion(Parts(layers, BATCH), MACHINES["unlike"], seed=5, num_threads=1)
    ops = asked.about(Problem.build(layers(1), asked.cluster))
    assert (ops.seed, ops.num_threads, ops.settings) == (5, 1, asked.settings)
    assert np.array_equal(ops.problem.memory_limit_bytes, [10**9] * 3)
