"""A plan executed by worker threads computes what PyTorch computes, wherever its ops are; scripts, targets, turns."""

import threading

import numpy as np
import pytest
import torch

from benchmarks.op_times import measure_in_turn
from execute.placed_steps import CLUSTER, assert_same, cpus, randomly_placed, tower
from gdp import InputError, Problem, simulate
from gdp.cluster.detect.host import available_cores
from gdp.execute.backends import CPU, Target, backend_of, find_targets
from gdp.execute.host_executor import ThreadExecutor
from gdp.execute.measurement import one_device_order
from gdp.execute.script import scripts
from tiny_models import EXECUTED, REPEATED, TINY, captured


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in REPEATED)) for name in EXECUTED]
)
def test_random_placements(name: str) -> None:
    """Random placements give the bits of the unplaced step."""
    model, args, kwargs = EXECUTED[name]()
    found = captured(name)
    expected = found.program.replay(model, args, kwargs)
    content = found.program.bind(model, args, kwargs)
    for seed in range(3):
        order = randomly_placed(found, seed + 2, seed).order
        with ThreadExecutor(found.program, order, cpus()) as executor:
            executor.load(content)
            record = executor.step(content, retain=True)
            assert_same(executor.results(record), expected)
            assert torch.equal(executor.loss(record), expected.loss)


@pytest.mark.parametrize("name", ["rnnlm", "transformer_xl", "amoebanet"])
def test_memory_of_a_script(name: str) -> None:
    """On one device a script holds the tensors that the machine model counts."""
    graph = (found := captured(name)).graph
    simulation = simulate(Problem.build(graph, CLUSTER), np.zeros(graph.num_ops, np.int64))
    script, *others = scripts(found.program, simulation.order)
    own = np.where(graph.is_resident | (graph.view_of >= 0), 0, graph.tensor_bytes)
    outputs: dict[int, list[int]] = {}
    for tensor, producer in enumerate(graph.producers.tolist()):
        outputs.setdefault(producer, []).append(tensor)
    num_users = np.zeros(graph.num_tensors, np.int64)  # of a base: itself and its views
    held = peak = int(graph.resident_bytes.sum())
    for task in script:
        for tensor in outputs.get(task.op, []):
            num_users[tensor if graph.view_of[tensor] < 0 else graph.view_of[tensor]] += 1
            held += int(own[tensor])
        peak = max(peak, held)
        for tensor in task.drops:
            base = tensor if graph.view_of[tensor] < 0 else int(graph.view_of[tensor])
            num_users[base] -= 1
            held -= 0 if num_users[base] else int(own[base])
    assert not any(others)
    assert peak == simulation.peak_memory_bytes[0]


def test_scripts() -> None:
    """A script awaits, sends and drops each tensor once."""
    found = captured("gnmt")
    simulation = randomly_placed(found, 4, 1)
    made = scripts(found.program, simulation.order)
    sent = sorted((tensor, to) for script in made for task in script for to, tensor in task.sends)
    awaited = sorted(
        (tensor, device) for device, script in enumerate(made) for task in script for tensor in task.awaited
    )
    transfers = zip(simulation.transfer_tensors.tolist(), simulation.transfer_destinations.tolist(), strict=True)
    assert sent == awaited == sorted(transfers)
    dropped = sorted(tensor for script in made for task in script for tensor in task.drops)
    kept = found.graph.is_kept
    assert dropped == sorted(np.flatnonzero(~kept).tolist() + [tensor for tensor, _ in sent])


def test_cpus_share_tensors() -> None:
    """CPUs of one process hand over the tensor itself."""
    found, _ = tower()
    backend, content = backend_of(Target("cpu0", CPU), found.program.memory_for), torch.ones(3)
    assert backend.unpack(backend.pack(7, content, CPU)) is content


def test_deadlocks_are_refused() -> None:
    """An order that deadlocks is refused."""
    found, _ = tower()
    backwards = [list(range(found.graph.num_ops))[::-1]]
    with pytest.raises(InputError, match="deadlock"):
        scripts(found.program, backwards)


@pytest.mark.parametrize(
    ("names", "on", "message"),
    [
        (["p100-0"], None, "say where it runs"),
        (["cpu0", "cpu1"], ["cpu:0"], "on names 1 devices; the plan has 2"),
        (["cpu4096"], None, "there is no cpu:4096 here"),
        (["cuda99"], None, "there is no cuda:99 here"),
        (["a"], ["tpu:0"], "cpu, cpu:1, cpu:0-3 or cuda:0 is expected"),
        (["a"], ["cpu:3-1"], "there is no cpu:3-1 here"),
    ],
)
def test_missing_devices(names: list[str], on: list[str] | None, message: str) -> None:
    """Devices that are not there are named."""
    with pytest.raises(InputError, match=message):
        find_targets(names, on)


def test_places_by_name() -> None:
    """Devices run where their names say."""
    core = available_cores()[0]
    (target,) = find_targets([f"cpu{core}"])
    assert (target.device, target.cores, target.num_threads, target.place) == (CPU, (core,), 1, f"core {core}")


def test_measurements_in_turn() -> None:
    """Placements are measured in turn, and every op is timed."""
    model, args, kwargs = TINY["transformer_xl"]()
    found = captured("transformer_xl")
    simulation = randomly_placed(found, 2, 0)
    num_ops = found.graph.num_ops
    orders = {"placed": simulation.order[:2], "alone": one_device_order(num_ops, 1, 2)}
    threads_before = torch.get_num_threads()
    measurements = measure_in_turn(found.program, found.program.bind(model, args, kwargs), orders, cpus(2), steps=3)
    assert torch.get_num_threads() == threads_before
    for measurement in measurements.values():
        assert len(measurement.step_ns) == 3
        for step_ns, op_ns in zip(measurement.step_ns, measurement.op_ns()[:, 0], strict=True):
            assert (op_ns > 0).all()
            assert op_ns.sum() <= 2 * step_ns
    starts = {name: [record.start_ns for record in measurement.records] for name, measurement in measurements.items()}
    assert all(a < b for a, b in zip(starts["placed"], starts["alone"], strict=True))
    assert measurements["alone"].records[0].devices[0].ops == ()


def test_threads_end() -> None:
    """No thread outlives its executor."""
    found = captured("vit")

    def workers() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("gdp-")]

    with ThreadExecutor(found.program, one_device_order(found.graph.num_ops, 0, 2), cpus(2)):
        assert workers() == ["gdp-cpu0", "gdp-cpu1"]
    assert workers() == []
