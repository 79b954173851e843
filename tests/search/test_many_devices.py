"""More than 64 devices: op placement, and layouts whose groups are placed alike."""

import numpy as np
import pytest

from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.graph import Graph, Op, Tensor
from gdp.parallel.layout import Layout
from gdp.parallel.rings import Rings
from gdp.parallel.step import Step
from gdp.search.batch_parts import Parts
from gdp.search.place import place
from gdp.search.settings import DEFAULTS
from gdp.simulator.plan import Plan
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import replay, verify
from problems import choose

PODS = "2x(5x(8xa100-sxm-80g)@100gbit)@200gbit"


def training_step(num_layers: int, samples: int, gradient_bytes: int = 10**6) -> Graph:
    """Returns the step of equal layers, of 1 us a sample forward and 2 us backward, with a parameter each."""
    ops = [Op(f"w{n}", "parameter", resident_bytes=gradient_bytes, group=n) for n in range(num_layers)]
    ops += [Op(f"f{n}", "mm", flops=2 * 10**7 * samples, phase="forward") for n in range(num_layers)]
    ops += [Op(f"b{n}", "mm", flops=4 * 10**7 * samples, phase="backward") for n in reversed(range(num_layers))]
    ops += [Op(f"w{n}.update", "sgd", bytes_accessed=8, phase="update", group=n) for n in range(num_layers)]
    backward = [3 * num_layers - 1 - n for n in range(num_layers)]
    tensors = [
        Tensor(n, (num_layers + n, backward[n], 3 * num_layers + n), gradient_bytes, resident=True)
        for n in range(num_layers)
    ]
    for n in range(num_layers):
        later = (num_layers + n + 1,) if n + 1 < num_layers else ()
        tensors.append(Tensor(num_layers + n, (*later, backward[n]), 10**4 * samples))
        earlier = (backward[n - 1],) if n else ()
        tensors += [Tensor(backward[n], (3 * num_layers + n,), gradient_bytes)]
        tensors += [Tensor(backward[n], earlier, 10**4 * samples)] if earlier else []
    return Graph.build("layers", ops, tensors)


def parts(batch_size: int) -> Parts:
    """Returns the parts of a batch of that many samples."""
    return Parts(lambda count: training_step(4, batch_size // count), batch_size, training_step(4, batch_size))


@pytest.mark.parametrize("devices", ["72xp100-pcie-16g", PODS])
def test_op_placement_is_valid_and_not_slower_than_one_device(devices: str) -> None:
    """The plan of more than 64 devices replays to its own figures, and beats the quick placers."""
    graph = training_step(12, 64)
    plan = place(graph, devices, budget="300sims")
    assert plan.search is not None
    assert verify(Problem.build(graph, devices), plan) == []
    assert plan.step_time_ns <= min(
        baseline.step_time_ns for baseline in plan.search.baselines.values() if baseline.step_time_ns is not None
    )
    assert plan.step_time_ns == place(graph, devices, budget="300sims").step_time_ns


def test_side_by_side_chains_use_more_than_64_devices() -> None:
    """80 chains that share nothing take as long as one of them on 80 devices."""
    ops = [Op(f"c{chain}.{n}", flops=10**10) for chain in range(80) for n in range(3)]
    tensors = [Tensor(3 * chain + n, (3 * chain + n + 1,), 8) for chain in range(80) for n in range(2)]
    plan = place(Graph.build("chains", ops, tensors), "10x(8xa100-sxm-80g)@100gbit", budget="2000sims")
    assert len(np.unique(plan.placement)) > 64


def test_pins_and_unlike_devices_hold_on_many_devices() -> None:
    """A pin to the last device is kept, and devices of two kinds have their own times."""
    graph = training_step(6, 64)
    devices = "70xp100-pcie-16g+10xl4-24g"
    plan = place(graph, devices, budget="100sims", pins=[("^f3$", "gpu79")])
    assert plan.device_of("f3") == "gpu79"
    assert verify(Problem.build(graph, devices, pins=[("^f3$", "gpu79")]), plan) == []
    times = Problem.build(graph, devices).op_time_ns
    assert times[6, 0] != times[6, 79]


def test_a_layout_of_more_than_64_replicas_is_a_plan_like_others() -> None:
    """On 128 devices a replica on each is simulated exactly, and its plan is cut again from its own document."""
    cluster = Cluster.parse("16x(8xa100-sxm-80g)@100gbit")
    choice = choose(parts(256), cluster, layout=Layout.parse("data=128"), budget="20sims")
    plan, problem = choice.plan, choice.best.problem
    assert verify(problem, plan) == []
    assert plan.layout is not None
    again = Step.of_document(parts(256).exact, plan.layout)
    read = Plan.from_document(plan.to_document())
    assert replay(Problem.build(again.graph, cluster), read).step_time_ns == plan.step_time_ns
    assert choice.bound_ns <= plan.step_time_ns


def test_the_choice_of_a_layout_on_many_devices_beats_op_placement() -> None:
    """Of 160 devices in two pods more than 64 are used, and no replica has more than 64 places."""
    choice = choose(parts(320), Cluster.parse("2x(10x(8xa100-sxm-80g)@100gbit)@200gbit"), budget="60sims")
    used = {device for devices in choice.best.devices for device in devices}
    assert len(used) > 64
    assert all(len(each.devices[0]) <= 64 for each in choice.looked_at if not each.is_whole)
    wholes = [each.step_time_ns for each in choice.looked_at if each.is_whole and each.fits]
    assert not wholes or choice.plan.step_time_ns <= min(wholes)


def test_large_buckets_of_many_replicas_limit_the_hops() -> None:
    """128 replicas in one ring take 32,512 hops a bucket: 14 gradients of 25 MB are seven buckets, 227,584 hops."""
    graph = training_step(7, 1, 25 * 2**20)
    hops = Rings.of(128).num_hops
    assert hops == 2 * 128 * 127
    kinds = Step.of(graph, Layout((1,) * 128)).graph.kinds
    assert kinds.count("all_reduce.add") + kinds.count("all_reduce.copy") == 7 * hops
    many = Step.of(training_step(14, 1, 25 * 2**20), Layout((1,) * 128)).graph.kinds
    assert many.count("all_reduce.add") + many.count("all_reduce.copy") == 7 * hops


def test_a_step_that_is_too_large_is_refused_before_it_is_built() -> None:
    """A thousand replicas in one ring have two million hops: the error says how many ops and what to do."""
    links = [{"from": "*", "to": "*", "bandwidth": "24GB/s", "latency": "10us"}]  # not known to exchange at once
    cluster = Cluster.from_document(Cluster.parse("1024xl4-24g").to_document() | {"links": links})
    with pytest.raises(
        InputError, match=rf"about [0-9,]+ ops, and up to {DEFAULTS.large.most_ops:,} can be simulated; take fewer"
    ):
        choose(parts(1024), cluster, layout=Layout.parse("data=1024"), budget="2sims")


@pytest.mark.parametrize("placer", ["exact", "gdp-zero-shot"])
def test_placers_for_few_devices_say_so(placer: str) -> None:
    """A placer for up to 64 devices refuses 72 devices and recommends `auto`."""
    with pytest.raises(InputError, match="places on up to 64 devices, and there are 72; use auto"):
        place(training_step(2, 1), "72xl4-24g", placer=placer, budget="1sims")
