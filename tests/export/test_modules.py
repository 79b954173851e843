"""hf-device-map and torch-pipelining against accelerate and torch.distributed.pipelining."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from export_models import MODELS, graph_of, planned
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

import gdp
from gdp.export import hf_device_map, torch_pipelining
from gdp.export.snap import snap
from gdp.problem import Problem


class Devices(TorchFunctionMode):
    """Pretends that tensors are on GPUs: fails as PyTorch does where an operator gets tensors of two."""

    def __init__(self) -> None:
        super().__init__()
        self.where: dict[int, Any] = {}
        self.alive: list[torch.Tensor] = []

    def put(self, tensor: torch.Tensor, device: Any) -> torch.Tensor:
        self.alive.append(tensor)
        self.where[id(tensor)] = device
        return tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)]
        found = {self.where[id(x)] for x in tensors if id(x) in self.where and x.dim()}
        answer = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(answer) if isinstance(leaf, torch.Tensor)]
        if made and len(found) > 1:
            raise RuntimeError(f"Expected all tensors to be on the same device: {func} got {found}")
        for tensor in made:
            if found and not any(tensor is x for x in tensors):
                self.put(tensor, *found)
        return answer


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Devices]:
    """accelerate's hooks with pretended GPUs: moving a tensor makes a copy with a note."""
    from accelerate import hooks

    pretended = Devices()

    def set_module_tensor(module: torch.nn.Module, name: str, device: Any, **_: Any) -> None:
        pretended.put(
            module.get_parameter(name) if name in dict(module.named_parameters()) else module.get_buffer(name), device
        )

    def send(tree: Any, device: Any, **_: Any) -> Any:
        return tree_map(lambda x: pretended.put(x.clone(), device) if isinstance(x, torch.Tensor) else x, tree)

    monkeypatch.setattr(hooks, "set_module_tensor_to_device", set_module_tensor)
    monkeypatch.setattr(hooks, "send_to_device", send)
    return pretended


def leaves_of(output: Any) -> list[torch.Tensor]:
    return list(tree_leaves(output if isinstance(output, torch.Tensor) else output.to_tuple()))


def random_devices(seed: int, num_units: int, num_devices: int = 3) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(num_devices, size=num_units)


@pytest.mark.parametrize("name", MODELS)
def test_accelerate_runs_any_assignment_of_the_units_to_devices_and_gives_the_models_outputs(
    name: str, gpus: Devices
) -> None:
    from accelerate import dispatch_model
    from accelerate.utils import check_device_map

    problem = Problem.build(graph_of(name), gdp.Cluster.parse("3xp100-pcie-16g"))
    units = hf_device_map.read_units(problem)
    assert units.num_units >= 5
    for seed in range(4):
        model, args = MODELS[name]()
        with torch.no_grad():
            expected = leaves_of(model(*args))
        devices = random_devices(seed, units.num_units)
        content = hf_device_map.write(problem, units, devices)
        assert np.array_equal(hf_device_map.parse(content, problem, units), devices)
        device_map = json.loads(content)
        check_device_map(model, device_map)  # warns of keys that are no modules, raises for parameters without device
        dispatch_model(model, dict(device_map), main_device=next(iter(device_map.values())))
        with torch.no_grad(), gpus:
            output = leaves_of(model(*args))
        torch.testing.assert_close(output, expected)
        placement = units.place(devices).tolist()
        placed = dict(zip(problem.graph.op_names, placement, strict=True))
        for path, parameter in model.named_parameters():
            assert gpus.where[id(parameter)] == placed[path], path


def test_a_device_map_that_parts_a_residual_sum_fails_on_the_pretended_devices(gpus: Devices) -> None:
    # what the units avoid, so that the test above can fail
    from accelerate import dispatch_model

    model, args = MODELS["bert"]()
    inner = "bert.encoder.layer.0"
    device_map = dict.fromkeys(
        ["bert.embeddings", "bert.encoder.layer.1", "bert.encoder.layer.2", "cls", f"{inner}.attention"], 0
    )
    device_map |= {f"{inner}.intermediate": 0, f"{inner}.output.dense": 1, f"{inner}.output.LayerNorm": 1}
    dispatch_model(model, device_map, main_device=0)
    with torch.no_grad(), gpus, pytest.raises(RuntimeError, match="same device"):
        model(*args)


def test_the_device_map_is_the_smallest() -> None:
    problem = Problem.build(graph_of("llama"), gdp.Cluster.parse("2xp100-pcie-16g"))
    units = hf_device_map.read_units(problem)
    assert hf_device_map.device_map(problem, units, np.zeros(units.num_units, np.int64)) == {"": 0}
    devices = np.array([int("layers.3" in members[0] or "lm_head" in members[0]) for members in units.members])
    assert hf_device_map.device_map(problem, units, devices) == {
        "model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 0, "model.layers.2": 0, "model.norm": 0,
        "model.rotary_emb": 0, "model.layers.3": 1, "lm_head": 1,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["tied", "bert"])
@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
def test_pipelining_makes_the_stages_of_the_file_and_they_give_the_models_outputs(name: str, num_stages: int) -> None:
    from torch.distributed.pipelining import SplitPoint, pipeline

    problem = Problem.build(graph_of(name), gdp.Cluster.parse("3xp100-pcie-16g"))
    units = torch_pipelining.read_units(problem)
    cuts = np.sort(np.random.default_rng(num_stages).choice(np.arange(1, units.num_units), num_stages - 1, False))
    devices = np.searchsorted(cuts, np.arange(units.num_units), side="right")
    content = torch_pipelining.write(problem, units, devices)
    assert np.array_equal(torch_pipelining.parse(content, problem, units), devices)
    file = json.loads(content)
    model, args = MODELS[name]()
    with torch.no_grad():
        expected = leaves_of(model(*args))
        pipe = pipeline(model, args, split_spec={path: SplitPoint[x] for path, x in file["split_spec"].items()})
        assert pipe.num_stages == num_stages == len(file["devices"])
        torch.testing.assert_close(tree_leaves(pipe(*args)), expected)
    # each parameter is in the stage where the placement has it
    placed = dict(zip(problem.graph.op_names, units.place(devices).tolist(), strict=True))
    for stage in range(num_stages):
        for path, _ in pipe.get_stage_module(stage).named_parameters():
            if path in placed and path not in ("embedding.weight", "bert.embeddings.word_embeddings.weight"):  # tied
                assert placed[path] == stage, path


@pytest.mark.parametrize("target", [hf_device_map.TARGET, torch_pipelining.TARGET])
@pytest.mark.parametrize("training", [False, True])
def test_a_snapped_plan_parses_back_to_a_placement_with_the_figure_that_is_printed(target: Any, training: bool) -> None:
    from gdp.export.snap import simulated

    problem, plan = planned("llama", training=training)
    snapped = snap(problem, plan, target)
    devices = target.parse(snapped.content, problem, snapped.units)
    again = simulated(problem, snapped.units.place(devices), plan)
    assert again.step_time_ns == snapped.step_time_ns
    assert again.feasible


def test_what_does_not_fit_keeps_its_weights_on_the_cpu_where_accelerate_would_find_them() -> None:
    """A GPU with room for 60 % of the step: the map has GPU and CPU entries that cover the model, begins with the GPU,
    and the figure is that of the map with weights fetched as each module begins, which fits."""
    from accelerate.utils import check_device_map

    from gdp.accelerate_maps import fetching_late, placement_of

    graph = graph_of("llama")
    roomy = gdp.Cluster.parse("p100-pcie-16g+cpu-16core")
    peak = gdp.simulate(Problem.build(graph, roomy), np.zeros(graph.num_ops, np.int64)).peak_memory_bytes[0]
    limit = {"gpu0": int(0.6 * peak)}
    problem = Problem.build(graph, roomy, max_memory_bytes=limit)
    plan = gdp.place(graph, roomy, budget="200sims", max_memory_bytes=limit)
    snapped = snap(problem, plan, hf_device_map.TARGET)
    assert snapped.is_offloaded
    assert not snapped.simulation.missing_bytes.any()
    found = json.loads(snapped.content)
    assert set(found.values()) == {0, "cpu"}
    assert next(iter(found.values())) == 0
    check_device_map(MODELS["llama"]()[0], found)
    placement = placement_of(problem, found)
    assert placement is not None
    late = fetching_late(problem, placement)
    assert late is not None
    program = [np.flatnonzero(late[1] == device) for device in range(2)]
    assert gdp.simulate(*late, order=program).step_time_ns == snapped.step_time_ns == snapped.program_order_ns
    assert not snap(problem, plan, hf_device_map.TARGET, may_offload=False).is_offloaded
