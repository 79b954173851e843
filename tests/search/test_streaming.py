"""Weight streaming: parameters that do not fit are sent shortly before they are used."""

from itertools import islice, permutations

import numpy as np
from hypothesis import given, settings

from gdp.cluster import Cluster, Device, Route
from gdp.graph import Graph, Op, Tensor
from gdp.search.place import place
from gdp.search.question import plan_of
from gdp.search.streaming.stream_layout import roomy
from gdp.search.streaming.stream_weights import stream_weights
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import Simulation, simulate, verify
from strategies import FEATURES, Instance, instances

MS, MB = 10**6, 10**6
LAYERS = 24


def layers(weight_bytes: int = 100 * MB, result_bytes: int = 0) -> Graph:
    """`LAYERS` layers of 10 ms on the GPU with a weight each, and a small op after each.

    With `result_bytes`, a product with a result of that size and a loss follow.
    """
    ops, tensors = [], []
    for layer in range(LAYERS):
        weight, product, norm = 3 * layer, 3 * layer + 1, 3 * layer + 2
        ops.append(Op(f"w{layer}", "parameter", resident_bytes=weight_bytes, time_ns={"gpu": 0, "slow": 0, "cpu": 0}))
        ops.append(Op(f"mm{layer}", "mm", time_ns={"gpu": 10 * MS, "slow": 20 * MS, "cpu": 1000 * MS}))
        ops.append(Op(f"norm{layer}", "norm", time_ns={"gpu": MS // 10, "slow": MS // 10, "cpu": MS // 10}))
        tensors.append(Tensor(weight, (product,), weight_bytes, resident=True))
        tensors.append(Tensor(product, (norm,), 1000))
        if layer + 1 < LAYERS:
            tensors.append(Tensor(norm, (norm + 2,), 1000))
    if result_bytes:
        table = 3 * LAYERS
        ops.append(Op("table", "parameter", resident_bytes=weight_bytes, time_ns={"gpu": 0, "slow": 0, "cpu": 0}))
        ops.append(Op("logits", "mm", time_ns={"gpu": MS, "slow": MS, "cpu": 40 * MS}))
        ops.append(Op("loss", "loss", time_ns={"gpu": MS, "slow": MS, "cpu": MS}))
        tensors.append(Tensor(table - 1, (table + 1,), 1000))
        tensors.append(Tensor(table, (table + 1,), weight_bytes, resident=True))
        tensors.append(Tensor(table + 1, (table + 2,), result_bytes))
    return Graph.build("layers", ops, tensors)


def pairs_of_products() -> Graph:
    """`LAYERS` layers, each the sum of two products of one input with a weight each: 20 ms on the slow GPU or 40 ms."""
    ops, tensors = [], []
    none, times = {"slow": 0, "cpu": 0}, {"slow": 20 * MS, "cpu": 40 * MS}
    for layer in range(LAYERS):
        left, right, first, second, total = range(5 * layer, 5 * layer + 5)
        ops.append(Op(f"left{layer}", "parameter", resident_bytes=100 * MB, time_ns=none))
        ops.append(Op(f"right{layer}", "parameter", resident_bytes=100 * MB, time_ns=none))
        ops += [Op(f"first{layer}", "mm", time_ns=times), Op(f"second{layer}", "mm", time_ns=times)]
        ops.append(Op(f"sum{layer}", "add", time_ns=none))
        tensors += [Tensor(left, (first,), 100 * MB, resident=True), Tensor(right, (second,), 100 * MB, resident=True)]
        tensors += [Tensor(first, (total,), 1000), Tensor(second, (total,), 1000)]
        if layer + 1 < LAYERS:
            tensors.append(Tensor(total, (first + 5, second + 5), 1000))
    return Graph.build("pairs", ops, tensors)


def machine(
    gpu_bytes: int, bytes_per_second: int = 20 * 10**9, num_gpus: int = 1, kinds: tuple[str, ...] = ("gpu",)
) -> Cluster:
    """GPUs, a CPU with room, and links that take 5 ms for 100 MB."""
    figures = {"flops_per_second": {"float32": 10**12}, "memory_bytes_per_second": 10**12, "launch_ns": 0}
    devices = [
        *(Device(f"gpu{n}", kinds[n % len(kinds)], memory_bytes=gpu_bytes, **figures) for n in range(num_gpus)),
        Device(name="cpu", kind="cpu", memory_bytes=10**12, **figures),
    ]
    pairs = permutations(range(len(devices)), 2)
    routes = {pair: Route(1000, bytes_per_second, (f"{pair}",)) for pair in pairs}
    return Cluster.build("machine", devices, routes)


def fastest(problem: Problem) -> Simulation | None:
    """Of all steps that are tried the fastest that fits."""
    fit = [found for found in stream_weights(problem) if found.feasible]
    return min(fit, key=lambda found: found.step_time_ns, default=None)


def test_a_gpu_that_holds_an_eighth_of_the_weights_loses_next_to_nothing_where_transfers_are_faster_than_layers() -> (
    None
):
    """A weight takes 5 ms to send and a layer 10.1 ms. 300 MB hold a weight in use and two on their way; without
    gates the 2.4 GB would arrive within 120 ms, of which the GPU has used half by then."""
    problem = Problem.build(layers(), machine(300 * MB + 10**4))
    at_once = simulate(problem, np.array([0 if op % 3 else 1 for op in range(3 * LAYERS)]))
    assert not at_once.feasible
    found = fastest(problem)
    assert found is not None
    assert found.feasible
    everything_ns = LAYERS * 10 * MS + LAYERS * MS // 10
    assert found.step_time_ns <= everything_ns + 5 * MS + LAYERS * 10_000  # the first weight, and the gates' latencies


def test_where_transfers_limit_the_step_only_what_does_not_fit_is_sent() -> None:
    """A weight takes 50 ms to send: with 12 to 14 of 24 weights in the GPU's memory, 10 to 12 are sent."""
    problem = Problem.build(layers(), machine(1400 * MB, bytes_per_second=2 * 10**9))
    found = fastest(problem)
    assert found is not None
    num_sent = int((found.transfer_tensors % 3 == 0).sum())
    assert 10 <= num_sent <= 13
    assert found.step_time_ns <= (num_sent * 50 + 30) * MS


def test_two_gpus_take_turns_so_that_both_links_send() -> None:
    """A weight takes 15 ms to send and a layer 10.1 ms, hardly a weight fits twice: over one link all that does not
    stay takes longer than the layers, over two half as long."""
    weights_ms, layers_ms = LAYERS * 15, LAYERS * 10.1
    link = 100 * MB * 1000 // 15
    one, two = (fastest(Problem.build(layers(), machine(500 * MB, link, num_gpus))) for num_gpus in (1, 2))
    assert one is not None
    assert two is not None
    assert one.step_time_ns >= (weights_ms - 5 * 15) * MS
    assert two.step_time_ns <= (layers_ms + 2 * 15) * MS
    assert {0, 1} <= set(two.placement[1::3].tolist())


def test_a_card_half_as_fast_takes_turns_too_and_the_shares_follow_from_links_and_speed() -> None:
    """A weight takes 30 ms to send, a card keeps 4 of 24: the fast card alone sends 20 in 600 ms. With 14 layers on it
    and 10 on the slow one, ops take 14 x 10 + 10 x 20 = 340 ms, and its link 10 x 30 = 300 ms. Weights on their way
    take the room of one or two more on each card, 60 ms of its link."""
    link = 100 * MB * 1000 // 30
    alone = fastest(Problem.build(layers(), machine(500 * MB, link)))
    both = fastest(Problem.build(layers(), machine(500 * MB, link, 2, ("gpu", "slow"))))
    assert alone is not None
    assert both is not None
    assert alone.step_time_ns >= 19 * 30 * MS
    assert both.step_time_ns <= 400 * MS
    num_layers = np.bincount(both.placement[1::3], minlength=3)
    assert num_layers[0] >= num_layers[1] > 4


def test_where_links_are_slow_cards_are_full_and_the_slowest_device_takes_what_is_left() -> None:
    """A weight takes 2 s to send. Each card holds 8 of 24 layers: 8 x 10 + 8 x 20 + 8 x 1000 ms, and 0.1 ms for each
    small op. Balanced stages are no faster: nothing runs at once. The first step tried is this one."""
    problem = Problem.build(layers(), machine(800 * MB + 10**5, 50 * MB, 2, ("gpu", "slow")))
    filled = next(stream_weights(problem))
    assert filled.feasible
    assert np.bincount(filled.placement[1::3], minlength=3).tolist() == [8, 8, 8]
    assert filled.step_time_ns <= (8 * 10 + 8 * 20 + 8 * 1000 + LAYERS // 10 + 1) * MS


def test_while_the_cpu_computes_weights_are_sent_to_full_cards() -> None:
    """A weight takes 2 s to send, a layer 1 s on the CPU. Cards that are full leave 8 of 24 layers to the CPU; a card
    that drops weights after their use computes a ninth, and the CPU 6 or 7, while weights are on their way."""
    problem = Problem.build(layers(), machine(800 * MB + 10**5, 50 * MB, 2, ("gpu", "slow")))
    found, filled = fastest(problem), next(stream_weights(problem))
    assert found is not None
    assert found.step_time_ns < filled.step_time_ns
    assert (found.transfer_tensors % 3 == 0).any()
    assert np.bincount(found.placement[1::3], minlength=3)[2] < 8


def test_few_simulations_are_enough_where_one_card_streams() -> None:
    """A weight takes 5 ms to send and a layer 10.1 ms: of 40 simulations one takes at most two weights more than all
    layers, and no step with weights sent is simulated twice."""
    steps = list(islice(stream_weights(Problem.build(layers(), machine(500 * MB))), 40))
    assert min(found.step_time_ns for found in steps if found.feasible) <= (LAYERS * 10.1 + 2 * 5) * MS
    sent = [found for found in steps if (found.transfer_tensors % 3 == 0).any()]
    assert len({(found.placement.tobytes(), *(ops.tobytes() for ops in found.order)) for found in sent}) == len(sent)


def test_a_card_computes_one_of_two_products_while_the_cpu_computes_the_other() -> None:
    """The card holds 24 of 48 weights. Both products of 12 layers on it: 12 x 2 x 20 + 12 x 2 x 40 = 1440 ms. One
    product of each layer on it: 24 x 40 = 960 ms."""
    found = fastest(Problem.build(pairs_of_products(), machine(2400 * MB + 10**5, 50 * MB, 1, ("slow",))))
    assert found is not None
    assert found.step_time_ns <= 1.05 * 960 * MS


def test_what_has_no_room_on_the_card_goes_elsewhere_and_the_rest_is_streamed_to_it() -> None:
    """The result of 1 GB takes 40 ms on the CPU, its consumer 1 ms; a layer takes 5 ms to send, 10.1 ms to compute."""
    problem = Problem.build(layers(result_bytes=1000 * MB), machine(300 * MB + 10**4))
    assert np.flatnonzero(~roomy(problem)[:, 0]).tolist() == [3 * LAYERS, 3 * LAYERS + 1, 3 * LAYERS + 2]
    found = fastest(problem)
    assert found is not None
    assert found.step_time_ns <= (LAYERS * 10.1 + 5 + 41 + 1) * MS


def test_pins_to_one_of_the_cards_leave_the_others_to_turns() -> None:
    """Layers 3 and 4 with their weights are the slow card's: it still computes others, whose weights are sent."""
    pins = [(f"^(w|mm|norm){layer}$", "gpu1") for layer in (3, 4)]
    link = 100 * MB * 1000 // 30
    found = fastest(Problem.build(layers(), machine(500 * MB, link, 2, ("gpu", "slow")), pins=pins))
    assert found is not None
    assert set(found.placement[9:15].tolist()) == {1}
    assert found.step_time_ns <= 420 * MS
    assert {0, 1, 2} <= set(found.placement.tolist())


def test_what_must_be_on_the_host_is_computed_there_and_weights_are_streamed_all_the_same() -> None:
    """An op pinned to the host runs there, and weight streaming still reaches about the GPU's time."""
    found = fastest(Problem.build(layers(), machine(400 * MB + 10**4), pins=[("norm12", "cpu")]))
    assert found is not None
    assert found.placement[3 * 12 + 2] == 1
    assert found.step_time_ns <= 1.1 * LAYERS * 10 * MS


def test_place_answers_with_it_and_the_plan_holds() -> None:
    """`place` answers with a streamed plan that verifies and is over three times as fast as every baseline."""
    problem = Problem.build(layers(), machine(300 * MB + 10**4))
    plan = place(problem.graph, problem.cluster, budget="200sims")
    assert verify(problem, plan) == []
    assert plan.step_time_ns < 1.1 * LAYERS * 10 * MS  # the classical placers need more than a second
    assert all(baseline.step_time_ns > 3 * plan.step_time_ns for baseline in plan.search.baselines.values())


def test_nothing_is_streamed_where_everything_fits() -> None:
    """Weight streaming gives no candidates when all weights fit on the GPU."""
    assert list(stream_weights(Problem.build(layers(), machine(10**10)))) == []


@settings(max_examples=150)
@given(instances(max_devices=3, features=frozenset(FEATURES) - {"priorities"}))
def test_what_is_found_fits_obeys_all_constraints_and_is_a_plan(instance: Instance) -> None:
    """Every streamed placement obeys all constraints, and each one that fits makes a plan that verifies."""
    problem = Problem.build(instance.graph, instance.cluster)
    for found in stream_weights(problem):
        assert problem.broken_constraints(found.placement) == []
        if found.feasible:
            assert verify(problem, plan_of(found, 0, "auto", 0)) == []
