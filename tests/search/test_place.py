"""The main job: what `place` promises for any graph and cluster."""

import itertools
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from gdp.budget import Budget
from gdp.cluster import Cluster, Device, Route
from gdp.errors import InputError
from gdp.graph import Graph, Op, Tensor
from gdp.placers import CLASSICAL
from gdp.policy.pretrained import shipped
from gdp.search.candidate import Candidate
from gdp.search.ops.good_order import in_program_order
from gdp.search.place import place
from gdp.simulator.plan import Plan
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import evaluate_many, simulate, verify
from gdp.units.units import Units
from problems import recurrent, two_chains
from strategies import FEATURES, Instance, instances

GRAPH = recurrent()
CLUSTER = Cluster.parse("2xp100-pcie-16g")


SMALL = instances(max_ops=9, max_devices=3, features=frozenset(FEATURES) - {"priorities"})


def check_finds_what_fits(instance: Instance) -> None:
    """The plan verifies, is no worse than any baseline that fits, and fits whenever brute force finds a fit."""
    graph, cluster = instance.graph, instance.cluster
    problem = Problem.build(graph, cluster)
    plan = place(graph, cluster, budget=Budget(simulations=200), num_threads=1)
    assert plan.search is not None
    units = problem.graph.group_index
    choices = [np.flatnonzero(problem.allowed[units == unit].all(axis=0)) for unit in range(units.max() + 1)]
    placements = np.array([np.array(devices)[units] for devices in itertools.product(*choices)])
    _, peaks = evaluate_many(problem, placements, num_threads=1)
    if (peaks <= problem.memory_limit_bytes).all(axis=1).any():
        assert plan.status == "ok"
        assert verify(problem, plan) == []
        fitting = [baseline for baseline in plan.search.baselines.values() if baseline.status == "ok"]
        assert all(plan.step_time_ns <= (baseline.step_time_ns or 0) for baseline in fitting)
    elif plan.status == "ok":  # only another order than the default made it fit
        assert verify(problem, plan) == []


@given(SMALL)
@settings(max_examples=50)
def test_finds_what_fits_and_never_loses(instance: Instance) -> None:
    """On small random machines; `test_small_machines` has others, and the plain-Python simulator."""
    check_finds_what_fits(instance)


@pytest.mark.long
@given(SMALL)
@settings(max_examples=500)
def test_finds_what_fits_on_many_machines(instance: Instance) -> None:
    """As above, on 500 machines."""
    check_finds_what_fits(instance)


def test_one_of_few_placements_that_fit_is_found_on_a_small_budget() -> None:
    """6 of 19,683 fit: among those of random machines above, one that 100 nodes of the exact placer did not find."""
    times_ns = ["021", "202", "210", "110", "010", "210", "003", "011", "300"]
    consumers = [(1, 2, 3, 6), (3, 4, 5), (3, 8), (), (), (7,), (8,), (), ()]
    ops = [Op(f"op{op}", time_ns={f"d{d}": int(time) for d, time in enumerate(row)}) for op, row in enumerate(times_ns)]
    tensors = [
        Tensor(op, users, num_bytes)
        for op, (users, num_bytes) in enumerate(zip(consumers, (0, 3, 4, 0, 0, 2, 3, 4, 2), strict=True))
    ]
    devices = [
        Device(f"d{d}", "test-device", memory, {"float32": 10**9}, 10**9, 0) for d, memory in enumerate((1, 7, 5))
    ]
    routes = {
        (a, b): Route(0, 10**9 if a == 2 else 3 * 10**8, (f"d{a}-d{b}",)) for a in range(3) for b in range(3) if a != b
    }
    plan = place(
        Graph.build("test", ops, tensors), Cluster.build("test", devices, routes), budget=Budget(simulations=200),
        num_threads=1,
    )  # fmt: skip
    assert plan.status == "ok"


def test_threads_do_not_change_the_answer() -> None:
    """The same seed and number of simulations give the same plan, twice in a row and with one thread or two."""
    documents = [
        place(GRAPH, CLUSTER, budget="1500sims", seed=7, num_threads=threads).to_document() for threads in (1, 2, 1)
    ]
    assert documents[0] == documents[1] == documents[2]
    assert place(GRAPH, CLUSTER, budget="1500sims", seed=8).to_document() != documents[0]


def test_auto_asks_a_policy_of_ones_own_whatever_the_budget(tmp_path: Path) -> None:
    """It counts its simulations, so that the answer is the same twice; a file that is no policy is refused."""
    plans = [place(GRAPH, CLUSTER, budget="1500sims", seed=7, checkpoint=shipped(), num_threads=1) for _ in range(2)]
    assert plans[0].to_document() == plans[1].to_document()
    assert plans[0].search is not None
    assert plans[0].search.simulations <= 1500
    for budget in ("1500sims", "1s"):
        with pytest.raises(InputError, match="no such file"):
            place(GRAPH, CLUSTER, budget=budget, checkpoint=str(tmp_path / "none.safetensors"))


def test_stays_within_the_budget_of_simulations() -> None:
    """A budget in simulations is not passed by more than the classical placers' own."""
    for placer in ("auto", "local-search", "gdp-zero-shot"):
        for seed, budget in itertools.product(range(2), (5, 60, 500)):
            plan = place(GRAPH, CLUSTER, placer=placer, budget=Budget(simulations=budget), seed=seed)
            assert plan.search is not None
            assert plan.search.simulations <= max(budget, len(CLASSICAL) + 12)
            assert placer == "gdp-zero-shot" or budget < 500 or plan.search.simulations >= 400


def test_ends_early_where_the_bound_is_reached() -> None:
    """Only the part under noise is left to search then; before, it took all of the budget."""
    graph = Graph.build("two", [Op("a", flops=10**9), Op("b", flops=10**9)], [Tensor(0, (1,), 10**3)])
    plan = place(graph, "2xl4-24g+rtx4090-24g", budget="5000sims", num_threads=1)
    assert plan.gap == 0
    assert plan.search is not None
    assert plan.search.simulations < 2000


def test_robust_plans_say_what_to_expect() -> None:
    """With `robust` the plan still verifies, and gives the mean step time over perturbed costs, near its own."""
    plan = place(GRAPH, CLUSTER, budget="400sims", robust=0.02)
    assert plan.search is not None
    times = plan.search.under_noise
    assert times is not None
    assert times.mean_ns == pytest.approx(plan.step_time_ns, rel=0.1)
    assert times.mean_ns <= times.p95_ns <= 1.1 * plan.step_time_ns
    assert verify(Problem.build(GRAPH, CLUSTER), plan) == []


def test_a_start_is_not_lost() -> None:
    """What a search begins from, though it may part what reduction merges, is as slow as the answer or slower."""
    problem = Problem.build(GRAPH, CLUSTER)
    rng, units = np.random.default_rng(5), Units.of(problem)
    for _ in range(5):
        near = np.where(rng.random(problem.num_ops) < 0.02, 1, place(GRAPH, CLUSTER, budget="30sims").placement)
        simulation = simulate(problem, units.place_allowed(near[units.first_op]))
        start = Candidate.start(simulation)
        assert simulate(problem, start.placement, priority=start.priority).step_time_ns == simulation.step_time_ns
        plan = place(GRAPH, CLUSTER, placer="local-search", budget="2sims", starts=[start])
        assert plan.step_time_ns <= simulation.step_time_ns


@given(instances())
@settings(max_examples=60)
def test_the_order_of_the_program_costs_nothing(instance: Instance) -> None:
    """A step goes as the program where it takes no longer so, or lacks less memory, and else stays as it is."""
    found = simulate(Problem.build(instance.graph, instance.cluster), instance.placement, priority=instance.priority)
    kept = in_program_order(found)
    np.testing.assert_array_equal(kept.placement, found.placement)
    assert (kept.missing_bytes.sum(), kept.step_time_ns) <= (found.missing_bytes.sum(), found.step_time_ns)


def test_one_device_runs_the_program_in_its_order() -> None:
    """Both orders are as fast there."""
    plan = place(recurrent(), "1xp100-pcie-16g", placer="single", budget="1sims")
    assert plan.order[0].tolist() == sorted(plan.order[0].tolist())
    problem = plan.problem
    assert problem is not None
    assert simulate(problem, plan.placement).order[0].tolist() != plan.order[0].tolist()


def test_a_number_of_threads_below_one_is_refused() -> None:
    """The command line refuses it, too."""
    for wrong in (0, 1.5):
        with pytest.raises(InputError, match="num_threads is"):
            place(GRAPH, CLUSTER, budget="1sims", num_threads=wrong)  # type: ignore[arg-type]


def test_nothing_fits() -> None:
    """When nothing fits the plan is infeasible and says which device lacks how many bytes."""
    plan = place(GRAPH, CLUSTER, budget="300sims", max_memory_bytes={"gpu0": 1000, "gpu1": 1000})
    assert plan.status == "infeasible"
    assert plan.search is not None
    assert (plan.search.missing_bytes == np.maximum(plan.peak_memory_bytes - 1000, 0)).all()


def test_the_exact_placer_says_what_is_missing() -> None:
    """When nothing fits, the exact placer's plan is infeasible too, and is no error; it refuses `robust`."""
    plan = place(two_chains(), CLUSTER, placer="exact", max_memory_bytes={"gpu0": 10, "gpu1": 10})
    assert plan.status == "infeasible"
    with pytest.raises(InputError, match="robust"):
        place(two_chains(), CLUSTER, placer="exact", robust=0.02)


def test_stop_ends_the_search_with_the_best_so_far() -> None:
    """A stopped search returns a whole plan at once."""
    stop = threading.Event()
    plan = place(GRAPH, CLUSTER, budget="600s", stop=stop, on_progress=lambda _: stop.set())
    assert plan.search is not None
    assert plan.search.interrupted
    assert verify(Problem.build(GRAPH, CLUSTER), plan) == []


def test_plan_files_round_trip() -> None:
    """A plan read back from its document is the plan."""
    plan = place(GRAPH, CLUSTER, budget="50sims")
    assert Plan.from_document(plan.to_document()).to_document() == plan.to_document()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"placer": "magic"}, "placer 'magic' is unknown"),
        ({"budget": "soon"}, "budget is 'soon'"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"robust": 0.7}, "robust is 0.7"),
        ({"reserve": 1.0}, "reserve is 1.0"),
        ({"pins": [("nothing", "gpu0")]}, "matches no module path"),
        ({"forbid": [("nothing", "gpu0")]}, "matches no op's kind"),
        ({"max_memory_bytes": {"gpu9": 1}}, "no such device"),
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, object], message: str) -> None:
    """Each is one clear error."""
    with pytest.raises(InputError, match=message):
        place(GRAPH, CLUSTER, **{"budget": "10sims", **arguments})  # type: ignore[arg-type]
