"""Layouts: the answer is never slower than what was tried, fits, and is the same when it is forced."""

from functools import cache

import numpy as np
import pytest

from gdp.bounds.layout_bound import layout_bound
from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.graph import Graph, Op, Tensor
from gdp.models.pytorch import capture_fn
from gdp.models.workloads import bert
from gdp.parallel.interpolation import have_same_ops, interpolated
from gdp.parallel.layout import Layout
from gdp.parallel.step import Step
from gdp.search.layouts.arrangement import Arrangement, DeviceSpeeds, arrangements, forced
from gdp.search.layouts.choose import DOES_NOT_FIT, NOT_ALLOWED, OK, choose_layout
from gdp.search.layouts.estimate import Estimator
from gdp.search.layouts.parts import Parts
from gdp.simulator.constraints import Constraints
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate, verify

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
    return Cluster.from_document(
        {"format": "gdp-cluster", "version": 1, "name": "some", "devices": devices, "links": links}
    )


def parts_of(**sizes: int) -> Parts:
    return Parts(lambda count: layers(count, **sizes), BATCH)


def test_the_answer_is_no_slower_than_any_layout_and_verifies() -> None:
    """On four equal devices a chain of layers is fastest with a replica on each."""
    cluster = machine_of([1.0] * 4)
    choice = choose_layout(parts_of(), cluster, budget="2000sims")
    problem = choice.trial.problem
    assert problem is not None
    assert verify(problem, choice.plan) == []
    assert choice.trial.layout.data == 4
    assert all(choice.plan.step_time_ns <= row.step_time_ns for row in choice.trials if row.status == OK)
    plain = Step.of(layers(4), Layout((1,) * 4))
    placement = plain.placement(np.zeros(layers(4).num_ops, int), np.arange(4)[:, None])
    assert choice.plan.step_time_ns <= simulate(Problem.build(plain.graph, cluster), placement).step_time_ns
    # 16 samples x 4 layers x 3 ms on four devices are 48 ms: what is left are rings and updates
    assert choice.layout_bound_ns == pytest.approx(48e6, rel=1e-3)
    assert choice.layout_bound_ns <= choice.plan.step_time_ns < 1.05 * choice.layout_bound_ns


def test_a_layout_that_is_forced_gives_the_same_step_time() -> None:
    cluster = machine_of([1.0] * 4, memory="200MB")
    best = choose_layout(parts_of(), cluster, budget="500sims")
    again = choose_layout(parts_of(), cluster, layout=best.trial.layout, budget="500sims")
    assert again.plan.step_time_ns == best.plan.step_time_ns
    document = best.plan.layout
    assert document is not None
    step = Step.of_document(layers, document)
    assert step.graph.fingerprint == best.plan.graph


def test_unequal_devices_take_micro_batches_in_proportion() -> None:
    """A device twice as fast as each of two others takes half of the batch."""
    cluster = machine_of([2.0, 1.0, 1.0])
    choice = choose_layout(parts_of(), cluster, budget="500sims")
    assert sorted(choice.trial.layout.microbatches)[-1] * 2 == choice.trial.layout.num_parts
    # 16 x 4 x 3 Gflop at 4 Tflop/s
    assert choice.plan.step_time_ns < 1.05 * 48e6


def test_tight_memory_is_kept_by_what_costs_least_time() -> None:
    """Weights of 3 x 4 MB fit; activations of 4 samples x 4 layers do not, and more micro-batches hold fewer."""
    parts = parts_of(held_bytes=10**6)
    # a replica of 4 samples holds 4 x 4 MB of activations at once, one of 2 samples 8 MB
    roomy, tight = (
        choose_layout(parts, machine_of([1.0] * 4, memory=size), budget="300sims") for size in ("1GB", "24MB")
    )
    assert max(roomy.plan.peak_memory_bytes) > 24 * 10**6 >= max(tight.plan.peak_memory_bytes)
    assert tight.plan.status == "ok"
    assert tight.plan.step_time_ns < 1.1 * roomy.plan.step_time_ns


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


def test_a_pin_keeps_replicas_away() -> None:
    """With an op pinned to one device its replicas cannot be on others, and the step is not cut so."""
    pinned = Constraints(pins=(("w0", "d1"),))
    choice = choose_layout(parts_of(), machine_of([1.0] * 2), pinned, budget="300sims")
    assert choice.trial.layout.data == 1
    assert choice.plan.status == "ok"


def test_steps_between_two_batch_sizes_are_those_that_are_captured() -> None:
    steps = {
        samples: capture_fn(
            lambda samples=samples: bert.build(bert.BERTConfig(samples, 1, 5, 2, 8, 2, 16)), name="bert"
        ).graph
        for samples in (2, 4, 8)
    }
    assert have_same_ops(steps[2], steps[8])
    assert interpolated(steps[2], 2, steps[8], 8, 4).fingerprint == steps[4].fingerprint


def test_no_placement_of_any_layout_is_below_its_bound() -> None:
    rng = np.random.default_rng(0)
    for speeds in ([1.0, 1.0], [3.0, 1.0, 0.5]):
        cluster = machine_of(speeds)
        bound_ns = layout_bound({1: layers(1), 4: layers(4)}, cluster)
        for layout in (Layout(), Layout((2, 2)), Layout((3, 1))):
            step = Step.of(layers(layout.num_parts), layout)
            problem = Problem.build(step.graph, cluster)
            for _ in range(5):
                devices = rng.integers(len(speeds), size=(layout.data, 1))
                placement = step.placement(np.zeros(layers(1).num_ops, int), devices)
                assert simulate(problem, placement).step_time_ns >= bound_ns


def test_arrangements_use_groups_that_are_alike() -> None:
    pairs = DeviceSpeeds(np.array([1.0, 2.0, 1.0, 2.0]), np.array([0, 1, 0, 1]))
    found = {(way.layout.data, way.devices) for way in arrangements(pairs, 16)}
    assert (2, ((0, 1), (2, 3))) in found
    assert all(len({len(group) for group in groups}) == 1 for _, groups in found)


@pytest.mark.parametrize(
    ("layout", "problem"),
    [
        (Layout((1,) * 5), "5 replicas"),
        (Layout((2,) * 2, stages=3), "2 replicas of 3 stages each on 4 devices"),
        (Layout((3, 1), stages=2), "leave stages out"),
    ],
)
def test_layouts_that_do_not_go_on_the_devices_are_refused(layout: Layout, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        forced(DeviceSpeeds(np.ones(4), np.zeros(4, int)), layout, 240)


def test_a_batch_without_so_many_parts_is_refused_with_numbers_that_do() -> None:
    with pytest.raises(InputError, match=r"batch of 16 has no 3 equal micro-batches .*take 1, 2, 4, 8"):
        choose_layout(parts_of(), machine_of([1.0] * 3), layout=Layout((1,) * 3), budget="10sims")


def test_a_sample_alone_may_have_other_ops() -> None:
    """Copies that a batch needs are none of one sample: places of ops are those of the step that is cut."""

    def read(num_parts: int) -> Graph:
        whole = layers(num_parts)
        if num_parts < BATCH:
            return whole
        ops = [whole.op(op) for op in range(whole.num_ops)]
        tensors = [whole.tensor(tensor) for tensor in range(whole.num_tensors)]
        return Graph.build("one", [*ops, Op("more", "mm", flops=1, phase="forward")], tensors)

    choice = choose_layout(Parts(read, BATCH), machine_of([1.0] * 4, memory="20MB"), budget="200sims")
    assert choice.plan.status == "ok"
    layout = Layout((BATCH // 4,) * 4)
    assert choose_layout(Parts(read, BATCH), machine_of([1.0] * 4), layout=layout, budget="50sims").plan.status == "ok"


@pytest.mark.parametrize("layout", [Layout((4,), stages=3), Layout((2, 2), stages=2), Layout((1,), stages=4)])
def test_blocks_of_a_replica_are_on_its_stages_in_order(layout: Layout) -> None:
    """No search moves ops out of their stages: forward passes go from device to device, backward passes back."""
    choice = choose_layout(parts_of(), machine_of([1.0] * 4), layout=layout, budget="300sims")
    step, stages = choice.trial.step, choice.trial.layout.stages
    assert step is not None
    assert choice.trial.layout == layout
    for replica, devices in enumerate(choice.trial.devices):
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

    choice = choose_layout(Parts(read, BATCH), machine_of([1.0] * 2), budget="300sims")
    assert choice.plan.status == "ok"
    assert choice.trial.layout.num_parts not in (2, BATCH)
    refused = [trial for trial in choice.trials if trial.reason]
    assert {trial.layout.num_parts for trial in refused} == {2, BATCH}
    with pytest.raises(InputError, match="the model failed"):
        choose_layout(Parts(read, BATCH), machine_of([1.0] * 2), layout=Layout((1, 1)), budget="10sims")


def test_the_fastest_device_has_the_most_micro_batches() -> None:
    """Whatever the order of the numbers: `microbatches=1:1:2` on a device twice as fast as two others."""
    machine = DeviceSpeeds(np.array([1.0, 2.0, 2.0]), np.array([0, 1, 1]))
    assert forced(machine, Layout((1, 1, 2)), BATCH)[0].devices == ((1,), (2,), (0,))
    assert forced(machine, Layout((1, 1)), BATCH)[0].devices == ((0,), (1,))


def test_what_does_not_fit_is_better_than_what_is_not_allowed() -> None:
    """A pin keeps replicas from devices, which takes no time and lacks no memory; the answer lacks memory instead."""
    pinned = Constraints(pins=(("w0", "d1"),))
    choice = choose_layout(parts_of(), machine_of([1.0] * 2, memory="4MB"), pinned, budget="50sims")
    assert {trial.status for trial in choice.trials} >= {NOT_ALLOWED, DOES_NOT_FIT}
    assert choice.plan.status == "infeasible"
    assert choice.trial.missing_bytes > 0
