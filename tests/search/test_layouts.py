"""Layouts: the answer is never slower than what was tried, fits, and is the same when it is forced."""

from dataclasses import replace
from functools import cache
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.models import bert
from gdp.arrays import I64
from gdp.budget import Budget, Clock
from gdp.cluster import Cluster
from gdp.cluster.device import Route
from gdp.errors import InputError
from gdp.graph import Graph, Op, Tensor
from gdp.graph.copies import HOST_COPY
from gdp.graph.interpolation import have_same_ops, interpolated
from gdp.models.pytorch import capture_fn
from gdp.parallel.layout import AUTO, BLOCKS, NONE, Layout
from gdp.parallel.rings import ring_over
from gdp.parallel.step import Step
from gdp.planning.layout_answer import LayoutAnswer
from gdp.search.batch_parts import Parts
from gdp.search.candidate import DOES_NOT_FIT, NOT_ALLOWED, OK, Arrangement
from gdp.search.layouts.arrangement import DeviceSpeeds, arrangements, forced, more_microbatches, replicated_ways
from gdp.search.layouts.dispatch import best_dispatch, levels_of, simulate_1f1b, stages_of
from gdp.search.layouts.estimate import Estimator
from gdp.search.layouts.known_ways import share_held, stages_of_groups
from gdp.search.layouts.layout_search import LayoutSearch
from gdp.search.layouts.less_memory import fewest_blocks, with_chosen_blocks
from gdp.search.layouts.replica_steps import PartFigures
from gdp.search.place import place
from gdp.search.question import BatchQuestion, Solution
from gdp.search.settings import LargeSteps
from gdp.simulator.constraints import Constraints
from gdp.simulator.orders import ONE_F_ONE_B
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate, verify
from problems import choose

BATCH, LAYERS = 16, 4


@cache
def layers(num_parts: int, weight_bytes: int = 10**6, held_bytes: int = 10**6) -> Graph:
    """A step of four layers with 16 / `num_parts` samples, of 1 ms a layer and sample forward and 2 ms backward."""
    samples = BATCH // num_parts
    count = LAYERS
    modules = [f"layers.{i}" for i in range(count)]
    ops = [Op(f"w{i}", "parameter", resident_bytes=3 * weight_bytes, group=i) for i in range(count)]
    ops += [
        Op(f"layers.{i}.f", "mm", flops=samples * 10**9, phase="forward", module=f"layers.{i}") for i in range(count)
    ]
    ops += [
        Op(f"{path}.b", "mm", flops=2 * samples * 10**9, phase="backward", module=path) for path in reversed(modules)
    ]
    ops += [Op(f"w{i}.update", "sgd", bytes_accessed=3 * weight_bytes, phase="update", group=i) for i in range(count)]
    backward = [3 * count - 1 - i for i in range(count)]
    tensors = [Tensor(i, (count + i, backward[i], 3 * count + i), weight_bytes, resident=True) for i in range(count)]
    for i in range(count):  # each activation is held for the backward pass
        readers = (count + i + 1, backward[i]) if i < count - 1 else (backward[i],)
        tensors.append(Tensor(count + i, readers, samples * held_bytes))
    tensors += [Tensor(backward[i], (backward[i] + 1,), samples * held_bytes) for i in range(1, count)]
    tensors += [Tensor(backward[i], (3 * count + i,), weight_bytes) for i in range(count)]
    return Graph.build("layers", ops, tensors)


def machine_of(speeds: list[float], memory: str = "1GB", bandwidth: str = "12GB/s") -> Cluster:
    """Devices of these speeds in Tflop/s, all connected."""
    devices = [
        {
            "name": f"d{number}",
            "kind": f"x{speed}",
            "memory": memory,
            "flops": {"float32": speed * 1e12},
            "memory_bandwidth": "1TB/s",
            "launch": "1us",
        }
        for number, speed in enumerate(speeds)
    ]
    links = [{"from": "*", "to": "*", "bandwidth": bandwidth, "latency": "10us"}]
    content = {"devices": devices, "links": links if len(devices) > 1 else []}
    return Cluster.from_document({"format": "gdp-cluster", "version": 1, "name": "some", **content})


def machine_with_links(rates: np.ndarray) -> Cluster:
    """Equal devices of 1 Tflop/s and links of `rates` [D, D] in GB/s, each with a channel of its own."""
    devices = machine_of([1.0] * len(rates)).devices
    routes = {
        (a, b): Route(10_000, int(rates[a, b] * 1e9), (f"{a}->{b}",))
        for a in range(len(rates))
        for b in range(len(rates))
        if a != b
    }
    return Cluster.build("unlike", devices, routes)


def parts_of(**sizes: int) -> Parts:
    return Parts(lambda count: layers(count, **sizes), BATCH)


def test_the_answer_is_no_slower_than_any_layout_and_verifies() -> None:
    """On four equal devices a chain of layers is fastest with a replica on each."""
    cluster = machine_of([1.0] * 4)
    choice = choose(parts_of(), cluster, budget="2000sims")
    problem = choice.best.problem
    assert problem is not None
    assert verify(problem, choice.plan) == []
    assert choice.best.layout.data == 4
    assert all(choice.plan.step_time_ns <= row.step_time_ns for row in choice.looked_at if row.status == OK)
    plain = Step.of(layers(4), Layout((1,) * 4))
    placement = plain.placement(np.zeros(layers(4).num_ops, int), np.arange(4)[:, None])
    assert choice.plan.step_time_ns <= simulate(Problem.build(plain.graph, cluster), placement).step_time_ns
    # 16 samples x 4 layers x 3 ms on four devices are 48 ms: what is left are rings and updates
    assert choice.bound_ns == pytest.approx(48e6, rel=1e-3)
    assert choice.bound_ns <= choice.plan.step_time_ns < 1.05 * choice.bound_ns


def test_ops_are_placed_with_a_policy_of_ones_own() -> None:
    """The user's checkpoint is read when layouts are chosen, so a missing file is an input error."""
    with pytest.raises(InputError, match="no such file"):
        choose(parts_of(), machine_of([1.0] * 2), budget="200sims", checkpoint="none.safetensors")


def test_unequal_devices_take_micro_batches_in_proportion() -> None:
    """A device twice as fast as each of two others takes half of the batch."""
    cluster = machine_of([2.0, 1.0, 1.0])
    choice = choose(parts_of(), cluster, budget="500sims")
    assert sorted(choice.best.layout.microbatches)[-1] * 2 == choice.best.layout.num_parts
    # 16 x 4 x 3 Gflop at 4 Tflop/s
    assert choice.plan.step_time_ns < 1.05 * 48e6


def test_tight_memory_is_kept_by_what_costs_least_time() -> None:
    """Weights of 3 x 4 MB fit; activations of 4 samples x 4 layers do not, and more micro-batches hold fewer."""
    parts = parts_of(held_bytes=10**6)
    # a replica of 4 samples holds 4 x 4 MB of activations at once, one of 2 samples 8 MB
    roomy, tight = (choose(parts, machine_of([1.0] * 4, memory=size), budget="300sims") for size in ("1GB", "24MB"))
    assert max(roomy.plan.peak_memory_bytes) > 24 * 10**6 >= max(tight.plan.peak_memory_bytes)
    assert tight.plan.status == "ok"
    assert tight.plan.step_time_ns < 1.1 * roomy.plan.step_time_ns


def test_rings_avoid_slow_links_and_plans_keep_their_order() -> None:
    """Devices in a square, 0-2-1-3-0: the diagonals are ten times slower, and no ring takes one."""
    rates = np.full((4, 4), 12.0)
    for pair in ((0, 1), (1, 0), (2, 3), (3, 2)):
        rates[pair] = 1.2
    choice = choose(parts_of(), machine_with_links(rates), layout=Layout((1,) * 4), budget="20sims")
    document = choice.plan.layout
    assert document is not None
    assert document["ring"] in ([0, 2, 1, 3], [0, 3, 1, 2])
    assert Step.of_document(layers, document).graph.fingerprint == choice.plan.graph
    # without the diagonals the step takes as long as on equal links
    equal = choose(parts_of(), machine_of([1.0] * 4), layout=Layout((1,) * 4), budget="20sims")
    assert choice.plan.step_time_ns <= 1.001 * equal.plan.step_time_ns


@pytest.mark.parametrize("seed", range(8))
def test_no_ring_is_slower_for_its_order(seed: int) -> None:
    """On random links, but for what a dispatch by priorities leaves to chance."""
    rng = np.random.default_rng(seed)
    count = int(rng.choice([2, 4, 8]))
    cluster = machine_with_links(rng.choice([1.0, 3.0, 12.0], (count, count)))
    devices, graph, layout = np.arange(count)[:, None], layers(count, weight_bytes=10**7), Layout((1,) * count)
    times_ns = []
    for ring in (None, ring_over(cluster, devices)):
        step = Step.of(graph, layout, ring=ring)
        problem = Problem.build(step.graph, cluster)
        placement = step.placement(np.zeros(graph.num_ops, int), devices)
        times_ns.append(best_dispatch(problem, step, placement).step_time_ns)
    assert times_ns[1] <= 1.03 * times_ns[0]


def test_a_replica_on_one_device_computes_as_the_program_does() -> None:
    """No order of what it computes is faster in the machine model, and this one is on real devices."""
    graph, cluster = encoder(2), machine_of([1.0, 1.0])
    choice = choose(Parts(encoder, BATCH), cluster, layout=Layout((1, 1)), budget="20sims")
    step = Step.of_document(encoder, choice.plan.layout)
    for ops in choice.plan.order:
        computed = [op for op in ops.tolist() if not step.graph.is_collective[op] and step.origin[op] < graph.num_ops]
        assert computed == sorted(computed, key=lambda op: int(step.origin[op]))


@cache
def encoder(num_parts: int) -> Graph:
    """A small BERT of six layers, whose activations are far larger than its weights."""
    config = bert.BERTConfig(BATCH // num_parts, 6, 256, 2, 64, 2, 64)
    return capture_fn(lambda: bert.build(config), name="bert").graph


@pytest.mark.parametrize("text", ["data=2", "data=3,microbatches=2:1:1,zero=1", "microbatches=8"])
def test_no_more_blocks_are_recomputed_than_memory_asks_for(text: str) -> None:
    """Between what nothing and what everything recomputed needs some blocks do; the plan has their names."""
    layout = Layout.parse(text)
    peaks = [
        max(
            choose(
                Parts(encoder, BATCH), machine_of([1.0] * 3), layout=replace(layout, recompute=what), budget="1sims"
            ).plan.peak_memory_bytes
        )
        for what in ("none", "blocks")
    ]
    roomy, tight, none = (
        choose(
            Parts(encoder, BATCH),
            machine_of([1.0] * 3, memory=f"{bytes_}B"),
            layout=replace(layout, recompute="auto"),
            budget="1sims",
        )
        for bytes_ in (peaks[0], (peaks[0] + peaks[1]) // 2, peaks[1] // 10)
    )
    assert roomy.plan.layout is not None
    assert roomy.plan.layout["recompute"] == "none"
    assert tight.plan.status == "ok"
    assert tight.plan.layout is not None
    assert 0 < len(tight.plan.layout["recompute"]) < 6
    assert str(tight.best.layout) == f"{layout},recompute=auto"
    names = [LayoutAnswer.of(each, Parts(encoder, BATCH)).best.option for each in (roomy, tight)]
    assert names == [str(layout), f"{layout},recompute=auto"]  # no block is recomputed where there is room
    assert Step.of_document(encoder, tight.plan.layout).graph.fingerprint == tight.plan.graph
    assert none.plan.status == "infeasible"


@pytest.mark.parametrize("speeds", [[1.0], [1.0, 0.001]])
@pytest.mark.parametrize("share", [0.8, 0.6, 0.4])
def test_a_device_that_is_too_small_takes_less_at_a_time(share: float, speeds: list[float]) -> None:
    """Alone, or beside one that is too slow to hold a replica, it takes micro-batches or computes blocks twice."""
    whole = choose(Parts(encoder, BATCH), machine_of([1.0]), layout=Layout(), budget="1sims").plan
    cluster = machine_of(speeds, memory=f"{int(share * max(whole.peak_memory_bytes))}B")
    forced = choose(Parts(encoder, BATCH), cluster, layout=Layout.parse("recompute=auto"), budget="1sims").plan
    choice = choose(Parts(encoder, BATCH), cluster, budget="40sims")
    assert choice.plan.status == "ok"
    assert choice.plan.layout is not None
    assert choice.plan.step_time_ns < 1.2 * whole.step_time_ns
    assert forced.status != "ok" or choice.plan.step_time_ns <= forced.step_time_ns


def test_parts_that_are_none_are_refused() -> None:
    """MODEL and graphs in micro-batches are taken; anything else is named, with what is expected."""
    for wrong in (3, None, {"model": 1}):
        with pytest.raises(InputError, match="graph is a"):
            place(wrong, machine_of([1.0]), parallel="data=2")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"parallel is 2; .*data=4,zero=1"):
        place(Parts(encoder, BATCH), machine_of([1.0]), parallel=2)  # type: ignore[arg-type]


def test_activations_wait_on_the_cpu_of_their_host() -> None:
    """On quick links they go and come back while other blocks run; nothing takes longer. The plan has the blocks."""
    cards = machine_of([1.0, 1.0, 1e-3], bandwidth="100GB/s").devices
    cpu = replace(cards[2], name="cpu", kind="cpu")
    routes = {pair: Route(1_000, 10**11, (f"{pair}",)) for pair in permutations(range(3), 2)}

    def answer(layout: str, memory_bytes: int) -> Solution:
        devices = [*(replace(card, memory_bytes=memory_bytes) for card in cards[:2]), cpu]
        return choose(
            Parts(encoder, BATCH), Cluster.build("host", devices, routes), layout=Layout.parse(layout), budget="1sims"
        )

    whole = answer("data=2", 10**9)
    peak_bytes = int(max(whole.plan.peak_memory_bytes))
    assert answer("data=2", peak_bytes * 9 // 10).plan.status == "infeasible"
    away = answer("data=2,offload=auto", peak_bytes * 9 // 10)
    assert away.plan.status == "ok"
    assert away.plan.step_time_ns < 1.01 * whole.plan.step_time_ns
    assert away.plan.peak_memory_bytes[2] > 0
    assert str(away.best.layout) == "data=2,offload=auto"
    assert away.plan.layout is not None
    assert away.plan.layout["offload"][0] == "layers.0"
    assert Step.of_document(encoder, away.plan.layout).graph.fingerprint == away.plan.graph
    with pytest.raises(InputError, match="offload needs a CPU"):
        choose(Parts(encoder, BATCH), machine_of([1.0] * 2), layout=away.best.layout, budget="1sims")


def test_blocks_are_the_same_when_their_layout_is_forced() -> None:
    """The text that the answer prints, with recompute=auto, stands for the same blocks on the same machine."""
    cluster = machine_of([1.0] * 2, memory="50MB")
    best = choose(Parts(encoder, BATCH), cluster, budget="100sims")
    assert best.best.layout.recompute == "auto"
    again = choose(Parts(encoder, BATCH), cluster, layout=Layout.parse(str(best.best.layout)), budget="1sims")
    assert best.plan.layout is not None
    assert best.plan.layout["recompute"] not in ("none", "auto")
    assert again.plan.layout == best.plan.layout


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_what_waits_on_a_cpu_is_of_its_replica(zero: int) -> None:
    """Each copy on a host is named after the op that made it, and on the CPU of its replica; work stays as it was."""
    graph, layout = encoder(4), Layout((2, 1, 1), zero, offload="blocks")
    step, plain = Step.of(graph, layout), Step.of(graph, Layout((2, 1, 1), zero))
    placement = step.placement(np.zeros(graph.num_ops, int), [[0], [1], [2]], [3, 3, 4])
    assert step.graph.flops.sum() == plain.graph.flops.sum()
    waiting = np.flatnonzero(step.is_on_host)
    assert np.bincount(step.replica[waiting]).tolist() == [len(waiting) // 2, len(waiting) // 4, len(waiting) // 4]
    assert placement[waiting].tolist() == np.array([3, 3, 4])[step.replica[waiting]].tolist()
    assert (placement < 3).sum() == step.graph.num_ops - len(waiting) == plain.graph.num_ops
    for op in waiting.tolist():
        assert step.graph.op_names[op].startswith(f"{graph.op_names[step.origin[op]]}.host")


@given(st.lists(st.lists(st.integers(1, 9), max_size=6), min_size=1, max_size=3), st.data())
def test_the_fewest_blocks_are_those_that_trying_all_numbers_finds(saved: list[list[int]], data: st.DataObject) -> None:
    """Where memory falls with each block: in each place the first ones, and no more."""
    lack = np.array([data.draw(st.integers(0, sum(own) + 3)) for own in saved])
    ranked = [[f"{place}.{turn}" for turn in range(len(own))] for place, own in enumerate(saved)]

    def lacking(paths: tuple[str, ...]) -> np.ndarray:
        freed = [sum(size for turn, size in enumerate(own) if f"{p}.{turn}" in paths) for p, own in enumerate(saved)]
        return lack - np.array(freed)

    least = [next((n for n in range(len(own)) if sum(own[:n]) >= lack[p]), len(own)) for p, own in enumerate(saved)]
    expected = [path for paths, count in zip(ranked, least, strict=True) for path in paths[:count]]
    assert list(fewest_blocks(ranked, lacking)) == expected


def test_a_cpu_holds_activations_where_that_costs_least() -> None:
    """A batch that only fits in more micro-batches, or with activations elsewhere, on a machine with a CPU."""
    cards = machine_of([1.0, 1.0, 1e-3], bandwidth="100GB/s").devices
    routes = {pair: Route(1_000, 10**11, (f"{pair}",)) for pair in permutations(range(3), 2)}
    devices = [*(replace(card, memory_bytes=9 * 10**7) for card in cards[:2]), replace(cards[2], kind="cpu")]
    cluster = Cluster.build("host", devices, routes)
    choice = choose(Parts(encoder, BATCH), cluster, budget="300sims")
    assert choice.plan.status == "ok"
    fitting = {each.layout.offload: each.step_time_ns for each in choice.looked_at if each.status == OK}
    assert "auto" in fitting
    assert choice.plan.step_time_ns <= min(fitting.values())


def test_estimates_count_the_gradients_that_fsdp_keeps() -> None:
    """With ZeRO 3 a replica keeps a chunk of each gradient; what else it lacks is the layers that are gathered."""
    # 4 layers of 10 MB: a quarter of 3 x 40 MB held and of 40 MB of gradients is 40 MB, on cards of 1 MB
    # simulated: 2 layers gathered and one gradient are whole for a while, and a chunk of 2.5 MB is in flight
    cluster, layout = machine_of([1.0] * 4, memory="1MB"), Layout((1,) * 4, zero=3)
    parts = parts_of(weight_bytes=10**7, held_bytes=1)
    estimate = Estimator(parts, cluster, Constraints()).estimate(Arrangement(layout, ((0,), (1,), (2,), (3,))))
    assert estimate.missing_bytes == pytest.approx(39e6, rel=0.01)
    step = Step.of(parts.exact(4), layout)
    simulation = simulate(Problem.build(step.graph, cluster), step.replica)
    assert estimate.missing_bytes <= simulation.missing_bytes.max() <= estimate.missing_bytes + 33e6


@pytest.mark.parametrize(
    ("memory", "fits", "beside"), [("39MB", False, False), ("50MB", True, False), ("64MB", True, True)]
)
def test_what_fits_beside_gathers(memory: str, fits: bool, beside: bool) -> None:
    """40 MB are held as above, and three quarters of two layers and a gradient, 22.5 MB, are there besides at times."""
    layout = Layout((1,) * 4, zero=3)
    estimator = Estimator(
        parts_of(weight_bytes=10**7, held_bytes=1), machine_of([1.0] * 4, memory=memory), Constraints()
    )
    estimate = estimator.estimate(Arrangement(layout, ((0,), (1,), (2,), (3,))))
    assert (estimate.fits, estimator.fits_beside_gathers(estimate)) == (fits, beside)


def test_a_large_step_that_fits_by_the_b_level_fits() -> None:
    """Of large steps few orders are tried; the b-level, in which rivals may fit, is one of them."""
    graph, cluster = layers(2, weight_bytes=10**7), machine_of([1.0] * 2, bandwidth="1GB/s")
    step = Step.of(graph, Layout((1, 1)))
    placement = step.placement(np.zeros(graph.num_ops, int), [[0], [1]])
    alone = simulate(Problem.build(step.graph, cluster), placement)
    tight = {device.name: int(alone.peak_memory_bytes.max()) for device in cluster.devices}
    problem = Problem.build(step.graph, cluster, Constraints(max_memory_bytes=tight))
    assert best_dispatch(problem, step, placement, large=LargeSteps(slow_ops=0)).fits


def test_a_pin_keeps_replicas_away() -> None:
    """With an op pinned to one device its replicas cannot be on others, and the step is not cut so."""
    pinned = Constraints(pins=(("w0", "d1"),))
    choice = choose(parts_of(), machine_of([1.0] * 2), pinned, budget="300sims")
    assert choice.best.layout.data == 1
    assert choice.plan.status == "ok"


def test_steps_between_two_batch_sizes_are_those_that_are_captured() -> None:
    """A step interpolated between two batch sizes equals the step captured at that size."""
    steps = {
        samples: capture_fn(
            lambda samples=samples: bert.build(bert.BERTConfig(samples, 1, 5, 2, 8, 2, 16)), name="bert"
        ).graph
        for samples in (2, 4, 8)
    }
    assert have_same_ops(steps[2], steps[8])
    assert interpolated(steps[2], 2, steps[8], 8, 4).fingerprint == steps[4].fingerprint


def test_arrangements_use_groups_that_are_alike() -> None:
    """On two alike pairs of a slow and a fast device, each pair can be a replica, and replicas have equal sizes."""
    pairs = DeviceSpeeds(np.array([1.0, 2.0, 1.0, 2.0]), np.array([0, 1, 0, 1]))
    found = {(way.layout.data, way.devices) for way in arrangements(pairs, 16)}
    assert (2, ((0, 1), (2, 3))) in found
    assert all(len({len(group) for group in groups}) == 1 for _, groups in found)


def test_all_devices_are_used_by_batches_that_they_do_not_divide() -> None:
    """67 samples go to eight devices as replicas and as a pipeline of single samples, and 12 of one alone, in turn;
    unlike devices have equal shares too, which ZeRO 3 needs."""
    eight = DeviceSpeeds(np.ones(8), np.zeros(8, np.int64))
    ways = arrangements(eight, 67)
    assert any(len(way.devices) == 8 and way.layout.num_parts == 67 for way in ways)
    assert any(way.num_places == 8 and way.layout.num_parts == 67 for way in ways)
    unlike = DeviceSpeeds(np.array([1.0, 3.0, 3.0]), np.array([0, 1, 1]))
    assert any(way.layout == Layout((1,) * 3, zero=3) for way in replicated_ways(unlike, 24))
    assert any(way.layout.recompute == AUTO and way.num_places == 8 for way in arrangements(eight, 1))


def test_the_next_number_of_microbatches_is_the_next_divisor() -> None:
    """Six samples of each replica go in 1, 2, 3 or 6 parts; unequal shares are kept."""
    way: Arrangement | None = Arrangement(Layout((1,) * 8), tuple((device,) for device in range(8)))
    counts = []
    while way is not None:
        counts.append(way.layout.microbatches[0])
        way = more_microbatches(way, 48)
    assert counts == [1, 2, 3, 6]
    unequal = more_microbatches(Arrangement(Layout((2, 1)), ((0,), (1,))), 36)
    assert unequal is not None
    assert unequal.layout.microbatches == (4, 2)


@pytest.mark.parametrize(("bandwidth", "data"), [("0.05GB/s", 1), ("500GB/s", 4)])
def test_a_copy_that_no_device_holds_is_gathered_or_in_stages(bandwidth: str, data: int) -> None:
    """With little time a model that no device holds is cut by ZeRO 3 where links are quick, or into stages where they
    are slow: what promises more is simulated first."""
    parts = parts_of(weight_bytes=10**8)
    choice = choose(parts, machine_of([1.0] * 4, "0.75GB", bandwidth), budget="60sims")
    assert choice.plan.status == "ok"
    assert choice.best.layout.data == data
    assert choice.best.layout.zero == (3 if data > 1 else 0)


def test_weights_that_are_not_trained_are_cut_as_others_are() -> None:
    """With ZeRO 3 a replica holds a part of frozen parameters: all are counted, with the state of those trained."""
    ops = [
        Op("w", "parameter", resident_bytes=30, group=0),
        Op("frozen", "parameter", resident_bytes=400),
        Op("f", "mm", flops=10, phase="forward"),
        Op("b", "mm", flops=10, phase="backward"),
        Op("update", "sgd", phase="update", group=0),
    ]
    tensors = [
        Tensor(0, (2, 3, 4), 10, resident=True),
        Tensor(1, (2, 3), 400, resident=True),
        Tensor(2, (3,), 1),
        Tensor(3, (4,), 10),
    ]
    figures = PartFigures.of(Graph.build("lora", ops, tensors), machine_of([1.0]))
    assert (figures.parameter_bytes, figures.frozen_bytes, figures.state_bytes) == (410, 400, 20)
    assert figures.gradient_bytes == 10
    assert figures.kept_bytes == 1  # the gradient is no activation, and weights are held anyway
    ops[2] = replace(ops[2], role=HOST_COPY, origin=-1)
    assert PartFigures.of(Graph.build("offloads", ops, tensors), machine_of([1.0])).kept_bytes == 0


@pytest.mark.parametrize("devices", ["2xcpu-16core", "4xa100-sxm-80g"])
def test_a_small_copy_does_not_call_for_the_least_memory_first(devices: str) -> None:
    """What is held is compared with cards, or with CPUs where there are no others."""
    search = LayoutSearch(BatchQuestion(parts_of(), Cluster.parse(devices)), Clock(None))
    assert share_held(search) < 1


@pytest.mark.parametrize("devices", ["2x(4xl4-24g)@100gbit", "2x(1x(4xl4-24g)@100gbit)@200gbit", "8xl4-24g"])
def test_copies_in_stages_on_groups_are_for_several_hosts(devices: str) -> None:
    """Groups of two hosts, of pods as well, may each hold a stage; those of one host need none."""
    cluster = Cluster.parse(devices).grouped(4)
    search = LayoutSearch(BatchQuestion(parts_of(), cluster), Clock(None))
    assert (stages_of_groups(search) is None) == (share_held(search) == 0) == (devices == "8xl4-24g")


def test_stages_that_recompute_all_blocks_have_no_limit_in_flight_first() -> None:
    """Unlike stages wait in the published schedule. Where only one way of a large step is tried, it is that one unless
    all blocks are recomputed, which leaves few activations to limit."""
    graph, cluster = layers(BATCH), machine_of([1.0, 1.0])
    places = np.array([int("3" in name) for name in graph.op_names])  # three layers and one
    for modules in (BLOCKS, NONE):
        step = Step.of(graph, Layout((BATCH,), recompute=modules, stages=2), places=places)
        problem = Problem.build(step.graph, cluster)
        placement = step.placement(places, [[0, 1]])
        level = levels_of(problem, step, placement)[0]
        by_priority = simulate(problem, placement, priority=problem.priority(ONE_F_ONE_B, level))
        limited = simulate_1f1b(problem, placement, stages_of(step, placement), step.replica, [level])
        assert by_priority.step_time_ns < limited.step_time_ns
        found = best_dispatch(problem, step, placement, Clock(Budget(seconds=0.0)), LargeSteps(slow_ops=0))
        first = by_priority if modules == BLOCKS else limited
        assert np.array_equal(found.simulation.op_start_ns, first.op_start_ns)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("layout", "problem"),
    [
        (Layout((1,) * 5), "5 replicas"),
        (Layout((2,) * 2, stages=3), "2 replicas of 3 stages each on 4 devices"),
        (Layout((3, 1), stages=2), "leave stages out"),
    ],
)
def test_layouts_that_do_not_go_on_the_devices_are_refused(layout: Layout, problem: str) -> None:
    """A layout that needs too many devices or mixes stages with uneven replicas is an input error."""
    with pytest.raises(InputError, match=problem):
        forced(DeviceSpeeds(np.ones(4), np.zeros(4, int)), layout, 240)


def test_a_batch_without_so_many_parts_is_refused_with_numbers_that_do() -> None:
    """A batch that does not split into the requested parts is refused with the numbers that do divide it."""
    with pytest.raises(InputError, match=r"batch of 16 has no 3 equal micro-batches .*take 1, 2, 4, 8"):
        choose(parts_of(), machine_of([1.0] * 3), layout=Layout((1,) * 3), budget="10sims")


def test_a_sample_alone_may_have_other_ops() -> None:
    """Copies that a batch needs are none of one sample: places of ops are those of the step that is cut."""

    def read(num_parts: int) -> Graph:
        whole = layers(num_parts)
        if num_parts < BATCH:
            return whole
        ops = [whole.op(op) for op in range(whole.num_ops)]
        tensors = [whole.tensor(tensor) for tensor in range(whole.num_tensors)]
        return Graph.build("one", [*ops, Op("more", "mm", flops=1, phase="forward")], tensors)

    choice = choose(Parts(read, BATCH), machine_of([1.0] * 4, memory="20MB"), budget="200sims")
    assert choice.plan.status == "ok"
    layout = Layout((BATCH // 4,) * 4)
    assert choose(Parts(read, BATCH), machine_of([1.0] * 4), layout=layout, budget="50sims").plan.status == "ok"


@pytest.mark.parametrize("layout", [Layout((4,), stages=3), Layout((2, 2), stages=2), Layout((1,), stages=4)])
def test_blocks_of_a_replica_are_on_its_stages_in_order(layout: Layout) -> None:
    """No search moves ops out of their stages: forward passes go from device to device, backward passes back."""
    choice = choose(parts_of(), machine_of([1.0] * 4), layout=layout, budget="300sims")
    step, stages = choice.best.step, choice.best.layout.stages
    assert step is not None
    assert choice.best.layout == layout
    for replica, devices in enumerate(choice.best.devices):
        assert len(set(devices)) == stages
        turn = {device: stage for stage, device in enumerate(devices)}
        for end, is_back in ((".f", False), (".b", True)):
            own = [op for op in range(step.graph.num_ops) if step.replica[op] == replica]
            named = {step.graph.op_names[op]: turn[int(choice.plan.placement[op])] for op in own}
            first = [named[name] for i in range(LAYERS) for name in named if name.split("#")[0] == f"layers.{i}{end}"]
            assert first == sorted(first), is_back
            assert set(first) == set(turn.values())


def test_a_part_that_the_model_fails_with_leaves_other_layouts() -> None:
    """Batch normalisation of a single sample is an error of PyTorch, and none of other layouts."""

    def read(count: int) -> Graph:
        if count in (2, BATCH):
            raise InputError("the model failed")
        return layers(count)

    choice = choose(Parts(read, BATCH), machine_of([1.0] * 2), budget="300sims")
    assert choice.plan.status == "ok"
    assert choice.best.layout.num_parts not in (2, BATCH)
    refused = [each for each in choice.looked_at if each.refusal]
    assert {each.layout.num_parts for each in refused} == {2, BATCH}
    with pytest.raises(InputError, match="the model failed"):
        choose(Parts(read, BATCH), machine_of([1.0] * 2), layout=Layout((1, 1)), budget="10sims")


def test_the_fastest_device_has_the_most_micro_batches() -> None:
    """Whatever the order of the numbers: `microbatches=1:1:2` on a device twice as fast as two others."""
    machine = DeviceSpeeds(np.array([1.0, 2.0, 2.0]), np.array([0, 1, 1]))
    assert forced(machine, Layout((1, 1, 2)), BATCH)[0].devices == ((1,), (2,), (0,))
    assert forced(machine, Layout((1, 1)), BATCH)[0].devices == ((0,), (1,))


def test_what_does_not_fit_is_better_than_what_is_not_allowed() -> None:
    """A pin keeps replicas from devices, which takes no time and lacks no memory; the answer lacks memory instead."""
    pinned = Constraints(pins=(("w0", "d1"),))
    choice = choose(parts_of(), machine_of([1.0] * 2, memory="4MB"), pinned, budget="50sims")
    assert {each.status for each in choice.looked_at} >= {NOT_ALLOWED, DOES_NOT_FIT}
    assert choice.plan.status == "infeasible"
    assert choice.best.missing_bytes > 0


@pytest.mark.parametrize(("lacks", "time_ns", "chosen"), [(0, 9, "selective"), (0, 10, ("a",)), (1, 9, ("a",))])
def test_auto_is_selective_where_that_fits_and_is_quicker(lacks: int, time_ns: int, chosen: object) -> None:
    """One of two blocks that lack 5 bytes saves 5, and takes 10 ns; selectively all of them take `time_ns`."""

    def lacking(layout: Layout) -> I64:
        names = {"none": 5, "selective": lacks}
        return np.array([names.get(str(layout.recompute), 0)])

    def again_ns(layout: Layout) -> int:
        return time_ns if layout.recompute == "selective" else 10

    ranked, places = [("a", 0), ("b", 1)], np.zeros(2, np.int64)
    found = with_chosen_blocks(Layout(recompute="auto"), ranked, places, lacking, again_ns=again_ns)
    assert found.recompute == chosen
    assert with_chosen_blocks(Layout(recompute="auto"), ranked, places, lacking).recompute == ("a",)


def test_estimates_know_hosts() -> None:
    """Micro-batches that hosts limit are estimated as they are simulated, and auto takes those that are fastest.

    A micro-batch has 8 ops of 400 kernels, which a host issues in 12 us each, 38.4 ms; 16 samples compute for 192 ms.
    So 8 micro-batches take 8 x 38.4 = 307 ms, and 16 of them 614 ms. All samples at once do not fit in 80 MB.
    """
    device = replace(machine_of([1.0], memory="80MB").devices[0], issue_ns=12_000)
    cluster = Cluster.build("eager", [device], {})

    def part(num_parts: int) -> Graph:
        graph = layers(num_parts)
        return replace(graph, kernels=np.where(graph.flops > 0, 400, 1))

    parts = Parts(part, BATCH)
    estimator, times_ns = Estimator(parts, cluster, Constraints()), {}
    for count in (1, 2, 4, 8, 16):
        layout = Layout((count,))
        step = Step.of(part(count), layout)
        whole = simulate(Problem.build(step.graph, cluster), np.zeros(step.graph.num_ops, int))
        estimate = estimator.estimate(Arrangement(layout, ((0,),)))
        assert estimate.step_time_ns == pytest.approx(whole.step_time_ns, rel=0.05), count
        assert estimator.least(Arrangement(layout, ((0,),))).step_time_ns <= 1.01 * whole.step_time_ns
        times_ns[count] = whole.step_time_ns
    assert times_ns[8] == pytest.approx(8 * 38.4e6, rel=0.02)
    assert times_ns[16] == pytest.approx(16 * 38.4e6, rel=0.02)
    (chosen,) = choose(parts, cluster, budget="60sims").best.layout.microbatches
    assert chosen == min((2, 4, 8, 16), key=lambda count: times_ns[count])
