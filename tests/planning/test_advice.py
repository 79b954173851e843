"""Advice: answers by placing and simulating."""

from gdp.budget import Budget
from gdp.cluster import Cluster
from gdp.graph import Graph, Op, Tensor
from gdp.planning.advice import advise, machine_changes
from gdp.search.place import place
from gdp.simulator.constraints import Constraints
from gdp.simulator.plan import Plan
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import Simulation, replay, verify

GIB = 2**30
BUDGET = Budget(simulations=4000)


def branches(count: int, resident: int = GIB) -> Graph:
    """So many equal branches of three ops that join: each keeps a fast device busy for 10 ms."""
    ops = [Op("in")]
    tensors = []
    for branch in range(count):
        base = len(ops)
        ops += [Op(f"b{branch}.{step}", flops=31 * 10**9, resident_bytes=resident) for step in range(3)]
        tensors += [Tensor(0, (base,), 10**6), Tensor(base, (base + 1,), 10**6), Tensor(base + 1, (base + 2,), 10**6)]
    ops.append(Op("out"))
    tensors += [Tensor(3 * branch + 3, (len(ops) - 1,), 10**6) for branch in range(count)]
    return Graph.build("branches", ops, sorted(tensors, key=lambda tensor: tensor.producer))


def placed(graph: Graph, devices: str, **limits: object) -> tuple[Plan, Simulation]:
    cluster = Cluster.parse(devices)
    plan = place(graph, cluster, budget=BUDGET, **limits)  # type: ignore[arg-type]
    assert plan.status == "ok"
    return plan, replay(Problem.build(graph, cluster), plan)


def test_what_ifs_are_step_times_of_plans() -> None:
    """Four branches on three devices: with a fourth each has its own, two cannot hold them."""
    graph = branches(4, resident=3 * GIB)
    plan, simulation = placed(graph, "3xp100-pcie-16g")
    advice = advise(graph, simulation, plan, Constraints(), budget=BUDGET)
    times = {what_if.change: what_if.step_time_ns for what_if in advice.what_ifs}
    assert set(times) == {"one device fewer", "one device more", "links twice as fast", "twice the memory"}
    assert times["one device fewer"] is None  # 36 GiB do not fit in 32
    assert times["one device more"] is not None
    assert 0.5 < times["one device more"] / plan.step_time_ns < 0.8
    assert times["links twice as fast"] is not None
    assert times["twice the memory"] is not None
    assert times["twice the memory"] <= plan.step_time_ns
    assert advice.plan is plan
    assert not advice.not_asked


def test_a_plan_that_is_better_without_a_device_is_taken() -> None:
    """Given a plan that wastes time on a slow device, advice finds the one without and hands it in, verified."""
    graph = branches(2)
    cluster = Cluster.parse("2xrtx4090-24g+l4-24g")
    problem = Problem.build(graph, cluster)
    bad = place(graph, cluster, budget="200sims", pins=[("b1", "gpu2"), ("b0|in|out", "gpu0")])
    advice = advise(graph, replay(problem, bad), bad, Constraints(), budget=BUDGET)
    assert advice.plan.step_time_ns < 0.8 * bad.step_time_ns
    assert not (advice.plan.placement == 2).any()
    assert verify(problem, advice.plan) == []


def test_a_budget_that_is_over_leaves_questions() -> None:
    """Without time nothing is asked, and that is said."""
    graph = branches(2)
    plan, simulation = placed(graph, "2xp100-pcie-16g")
    advice = advise(graph, simulation, plan, Constraints(), budget=Budget(seconds=0.0))
    assert advice.what_ifs == ()
    assert [text.partition(" (")[0] for text in advice.not_asked[:2]] == ["one device fewer", "one device more"]
    assert "no time left" in advice.not_asked[0]


def test_a_second_cpu_is_no_advice() -> None:
    """One card more is; a CPU more is another host, even where the CPU is the busiest device."""
    plan, simulation = placed(branches(2), "rtx4090-24g+cpu-ryzen9-7950x")
    advice = advise(branches(2), simulation, plan, Constraints(), budget=BUDGET)
    assert [each.detail for each in advice.what_ifs if each.change == "one device more"] == ["gpu1 (rtx4090-24g)"]
    plan, simulation = placed(branches(2), "2xcpu-16core")
    advice = advise(branches(2), simulation, plan, Constraints(), budget=BUDGET)
    assert not any("more" in text for text in (*advice.not_asked, *(each.change for each in advice.what_ifs)))


def test_a_step_that_its_host_limits_is_told_of_runtimes() -> None:
    """A chain of 50 kernels waits for its host, 11 us for each: a CUDA graph takes what the device does."""
    mm = "aten.mm float32[10,500] float32[500,100] > float32[10,100]"
    ops = [Op(f"o{number}", "aten.mm", flops=10**6, phase="forward", shapes=mm) for number in range(50)]
    graph = Graph.build("chain", ops, [Tensor(number, (number + 1,), 100) for number in range(49)])
    plan, simulation = placed(graph, "1xa100-sxm-80g:eager")
    assert simulation.host_wait_fraction[0] > 0.2
    advice = advise(graph, simulation, plan, Constraints(), budget=Budget(simulations=60))
    times = {what_if.change: what_if.step_time_ns for what_if in advice.what_ifs}
    assert set(times) >= {"--runtime compile", "--runtime cuda-graphs"}
    kernel_ns = plan.step_time_ns - 50 * 11_000
    assert kernel_ns < 11_000
    assert times["--runtime cuda-graphs"] == 50 * kernel_ns


def test_times_of_single_ops_tell_nothing_of_joined_ones() -> None:
    """The chain has measured times: CUDA graphs of training replay its ops as they are, all else joins them."""
    mm = "aten.mm float32[10,500] float32[500,100] > float32[10,100]"
    chain = [Tensor(number, (number + 1,), 100) for number in range(49)]
    for phase, expected in (("forward", set()), ("backward", {"--runtime cuda-graphs"})):
        times = {"a100-sxm-80g": 1000}
        ops = [Op(f"o{at}", "aten.mm", 10**6, phase=phase, shapes=mm, time_ns=times) for at in range(50)]
        _, simulation = placed(Graph.build("chain", ops, chain), "1xa100-sxm-80g:eager")
        assert simulation.host_wait_fraction[0] > 0.2
        changes = machine_changes(simulation, Constraints(), None, None, memory_matters=False)
        assert {change.name for change in changes} == expected
