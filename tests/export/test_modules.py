"""hf-device-map and torch-pipelining against accelerate and torch.distributed.pipelining."""

import json
from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from export_models import MODELS, graph_of, planned
from readers import read_devices
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

import gdp
from gdp.export import hf_device_map, torch_pipelining
from gdp.export.adapt import adapt
from gdp.export.modules import first_input
from gdp.simulator.problem import Problem


class Devices(TorchFunctionMode):
    """Pretends that tensors are on GPUs: fails as PyTorch does where an operator gets tensors of two. GPU k is
    `cpu:k+1` where a model asks for the device of a tensor and names it again."""

    def __init__(self) -> None:
        super().__init__()
        self.where: dict[int, Any] = {}
        self.alive: list[torch.Tensor] = []
        self.sent: list[tuple[tuple[int, ...], Any]] = []  # by hooks, between GPUs: (shape, to)

    def put(self, tensor: torch.Tensor, device: Any) -> torch.Tensor:
        self.alive.append(tensor)
        self.where[id(tensor)] = device
        return tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == torch.Tensor.device.__get__ and isinstance(number := self.where.get(id(args[0])), int):
            return torch.device("cpu", number + 1)
        named = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.device) and leaf.index]
        if named:
            args, kwargs = tree_map(lambda x: torch.device("cpu") if isinstance(x, torch.device) else x, (args, kwargs))
            made = func(*args, **kwargs)
            return self.put(made.clone() if any(made is x for x in args) else made, named[0].index - 1)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        found = {self.where[id(x)] for x in tensors if id(x) in self.where and x.dim()}
        answer = func(*args, **kwargs)
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
        def move(x: Any) -> Any:
            if isinstance(x, UserDict):  # Transformers' keys and values that layers share, which move in place
                x.update({key: tuple(map(move, tensors)) for key, tensors in x.items()})
            if not isinstance(x, torch.Tensor) or (known := pretended.where.get(id(x))) == device:
                return x
            if known is not None:
                pretended.sent.append((tuple(x.shape), device))
            return pretended.put(x.clone(), device)

        return tree_map(move, tree)

    monkeypatch.setattr(hooks, "set_module_tensor_to_device", set_module_tensor)
    monkeypatch.setattr(hooks, "send_to_device", send)
    return pretended


def leaves_of(output: Any) -> list[torch.Tensor]:
    return list(tree_leaves(output if isinstance(output, torch.Tensor) else output.to_tuple()))


def random_devices(seed: int, num_units: int, num_devices: int = 3) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(num_devices, size=num_units)


def own_tensors(model: torch.nn.Module, device_map: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """The parameters and buffers that have an entry."""
    return [(path, x) for path, x in (*model.named_parameters(), *model.named_buffers()) if path in device_map]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:The following device_map keys do not match any submodules:UserWarning")
def test_accelerate_runs_any_assignment(name: str, gpus: Devices) -> None:
    """accelerate runs any assignment of the units to devices, and gives the model's outputs."""
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
        assert np.array_equal(read_devices("hf-device-map", content, problem, units), devices)
        device_map = json.loads(content)
        check_device_map(model, device_map)  # warns of keys that are no modules, raises for parameters without device
        for path, tensor in own_tensors(model, device_map):  # as from_pretrained loads it
            gpus.put(tensor, device_map[path])
        dispatch_model(model, dict(device_map), main_device=next(iter(device_map.values())))
        with torch.no_grad(), gpus:
            output = leaves_of(model(*args))
        torch.testing.assert_close(output, expected)
        placement = units.place(devices).tolist()
        placed = dict(zip(problem.graph.op_names, placement, strict=True))
        for path, parameter in (*model.named_parameters(), *own_tensors(model, device_map)):
            assert gpus.where[id(parameter)] == placed[path], path


def labelled(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A model whose head is not tied to its embedding, and inputs with labels."""
    from transformers import BertConfig, BertForSequenceClassification

    tokens = torch.arange(32).reshape(2, 16)
    if name == "llama":
        return MODELS["llama"]()[0], {"input_ids": tokens, "labels": (tokens * 7) % 200}
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=200,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    return BertForSequenceClassification(config).eval(), {"input_ids": tokens, "labels": torch.tensor([0, 1])}


@pytest.mark.parametrize(
    ("name", "members"),
    [
        # the gain of `model` is read between its third layer and its last, so it is with the third
        (
            "owned",
            [
                {"input", "token", "model.scale"},
                {"model.layers.0"},
                {"model.layers.1"},
                {"model.layers.2", "model.gain", "model.shift"},
                {"model.layers.3"},
                {"head"},
            ],
        ),
        ("siglip", [{"logit_scale", "logit_bias"}, {"text_model.encoder.layers.0"}, {"text_model.encoder.layers.1"}]),
        # the inner buffer, and the outer scale behind it, are with the last layer
        (
            "queries",
            [
                {"input", "query_tokens", "body.inner.position"},
                {"body.inner.blocks.a.1"},
                {"body.inner.blocks.b.0"},
                {"body.inner.blocks.b.1", "body.inner.steps", "body.scale"},
                {"head"},
            ],
        ),
        ("clip", [{"input", "logit_scale", "text_projection", "visual_projection"}, {"vision_model.encoder.layers.1"}]),
        (
            "gemma3n",
            [
                {"input", "model.embed_tokens", "lm_head"},
                {"model.embed_tokens_per_layer", "model.per_layer_input_scale"},
                {"model.per_layer_model_projection", "model.per_layer_projection_scale"},
                {"model.layers.0"},
                {"model.layers.1"},
                {"model.layers.2"},
                {"model.layers.3"},
            ],
        ),
    ],
)
def test_tensors_of_containers(name: str, members: list[set[str]]) -> None:
    """A container's own tensors glue none of its layers: they are with what it computes from them."""
    units = hf_device_map.read_units(Problem.build(graph_of(name), gdp.Cluster.parse("3xp100-pcie-16g")))
    numbers = [next(unit for unit, paths in enumerate(units.members) if expected <= set(paths)) for expected in members]
    assert len(set(numbers)) == len(members)


def test_offloaded_tensors_of_containers() -> None:
    """A container's own tensor is where the container computes, also if the module beside it is on the CPU."""
    # hooks fetch the weights of modules with an entry alone
    problem = Problem.build(graph_of("owned"), gdp.Cluster.parse("p100-pcie-16g+cpu-16core"))
    units = hf_device_map.read_units(problem)
    devices = np.array([int("model.gain" in paths) for paths in units.members])
    found = hf_device_map.device_map(problem, units, devices)
    assert {path: found[path] for path in ("model.gain", "model.layers.2", "model.layers.3")} == {
        "model.gain": 0,
        "model.layers.2": "cpu",
        "model.layers.3": 0,
    }
    # with inputs on GPU 1 the lowest number is still first, where accelerate has offloaded modules by default
    two = Problem.build(graph_of("owned"), gdp.Cluster.parse("2xp100-pcie-16g+cpu-16core"))
    inputs = units.index[first_input(two.graph)]
    found = hf_device_map.device_map(two, units, np.where(np.arange(units.num_units) == inputs, 1, 2 * devices))
    assert next(iter(found.values())) == found["model.gain"] == 0
    assert {1, "cpu"} < set(found.values())


def test_notes_on_tensors_of_containers() -> None:
    """A note names the tensors of containers that dispatch_model leaves, and none of the model itself."""
    problem = Problem.build(graph_of("owned"), gdp.Cluster.parse("2xp100-pcie-16g"))
    units = hf_device_map.read_units(problem)
    (note,) = hf_device_map.notes(problem, units, np.arange(units.num_units) % 2)
    assert "model.gain" in note
    assert "token" not in note
    assert hf_device_map.notes(problem, units, np.zeros(units.num_units, np.int64)) == []


def test_untied_heads_may_be_elsewhere(gpus: Devices) -> None:
    """An untied head of a causal language model trains on another GPU than the embedding."""
    from accelerate import dispatch_model

    model, inputs = labelled("llama")
    graph = gdp.capture(model, (), inputs, name="llama", training=True).graph
    problem = Problem.build(graph, gdp.Cluster.parse("3xp100-pcie-16g"))
    units = hf_device_map.read_units(problem)
    unit_of = {path: unit for unit, members in enumerate(units.members) for path in members}
    first, head = unit_of["model.embed_tokens"], unit_of["lm_head"]
    assert units.members[head] == ("lm_head",)
    expected = model(**inputs).loss
    expected.backward()
    gradients = {path: parameter.grad for path, parameter in model.named_parameters()}
    for seed in range(4):
        model, inputs = labelled("llama")
        devices = random_devices(seed, units.num_units)
        devices[first], devices[head] = seed % 2, 2
        device_map = hf_device_map.device_map(problem, units, devices)
        dispatch_model(model, device_map, main_device=next(iter(device_map.values())))
        with gpus:
            loss = model(**inputs).loss
        loss.backward()
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close({path: x.grad for path, x in model.named_parameters()}, gradients)


def test_heads_that_stay_with_the_inputs(gpus: Devices) -> None:
    """A head whose loss reads labels where they are stays with the inputs."""
    # BertForSequenceClassification does not move its labels to the logits
    from accelerate import dispatch_model

    model, inputs = labelled("classifier")
    graph = gdp.capture(model, (), inputs, name="classifier", training=True).graph
    units = hf_device_map.read_units(Problem.build(graph, gdp.Cluster.parse("3xp100-pcie-16g")))
    joined = next(members for members in units.members if "classifier" in members)
    assert {"input", "bert.embeddings"} <= set(joined)
    dispatch_model(model, {"bert": 0, "classifier": 2}, main_device=0)
    with gpus, pytest.raises(RuntimeError, match="same device"):
        model(**inputs)


def test_rotary_embeddings(gpus: Devices) -> None:
    """The difference that docs/exports.md states: the machine model sends cos and sin to a device once."""
    from accelerate import dispatch_model

    graph = graph_of("llama")
    problem = Problem.build(graph, gdp.Cluster.parse("2xp100-pcie-16g"))
    units = hf_device_map.read_units(problem)
    unit_of = {path: unit for unit, members in enumerate(units.members) for path in members}
    assert unit_of["model.rotary_emb"] == unit_of["model.embed_tokens"]
    devices = np.zeros(units.num_units, np.int64)
    far = [f"model.layers.{number}" for number in (1, 2, 3)]
    devices[[unit_of[path] for path in far]] = 1
    device_map = hf_device_map.device_map(problem, units, devices)
    assert [path for path, device in device_map.items() if device == 1] == far
    # positions, masks and cos are made where the embedding is, as Transformers does it
    placed = dict(zip(graph.op_names, units.place(devices).tolist(), strict=True))
    made = [
        op for op, module in zip(graph.op_names, graph.modules, strict=True) if module in ("model", "model.rotary_emb")
    ]
    assert len(made) > 20
    assert {placed[op] for op in made} == {0}
    model, args = MODELS["llama"]()
    dispatch_model(model, device_map, main_device=0)
    with torch.no_grad(), gpus:
        model(*args)
    cos_or_sin, hidden = (1, 16, 16), (2, 16, 32)
    assert gpus.sent.count((cos_or_sin, 1)) == 2 * len(far)
    assert gpus.sent.count((hidden, 1)) == 1
    assert gpus.sent.count((hidden, 0)) == 1  # to model.norm
    logits = (2, 16, 200)
    assert gpus.sent.count((logits, torch.device("cpu"))) == 1  # to where the inputs came from


def test_modules_that_nothing_feeds(tmp_path: Path) -> None:
    """A module without parameters that no unit feeds is with the inputs."""
    # without a mask, positions are read by the rotary embedding alone
    model, _ = MODELS["llama"]()
    model.config.save_pretrained(tmp_path)
    graph = gdp.load(f"hf:{tmp_path}?batch=2&sequence=16", training=False)
    units = hf_device_map.read_units(Problem.build(graph, gdp.Cluster.parse("2xp100-pcie-16g")))
    assert units.members == (
        ("input", "embed_tokens", "rotary_emb"),
        *((f"layers.{number}",) for number in range(4)),
        ("norm",),
    )


def test_parted_residual_sums_fail(gpus: Devices) -> None:
    """A device map that parts a residual sum fails on the pretended devices."""
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


def test_smallest_device_map() -> None:
    """The device map has as few entries as can be."""
    problem = Problem.build(graph_of("llama"), gdp.Cluster.parse("2xp100-pcie-16g"))
    units = hf_device_map.read_units(problem)
    assert hf_device_map.device_map(problem, units, np.zeros(units.num_units, np.int64)) == {"": 0}
    devices = np.array([int("layers.3" in members[0] or "lm_head" in members[0]) for members in units.members])
    assert hf_device_map.device_map(problem, units, devices) == {
        "model.embed_tokens": 0,
        "model.layers.0": 0,
        "model.layers.1": 0,
        "model.layers.2": 0,
        "model.norm": 0,
        "model.rotary_emb": 0,
        "model.layers.3": 1,
        "lm_head": 1,
    }


@pytest.mark.parametrize("name", ["tied", "bert"])
@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
def test_stages_of_pipelining(name: str, num_stages: int) -> None:
    """torch.distributed.pipelining makes the stages of the file, and they give the model's outputs."""
    from torch.distributed.pipelining import SplitPoint, pipeline

    problem = Problem.build(graph_of(name), gdp.Cluster.parse("3xp100-pcie-16g"))
    units = torch_pipelining.read_units(problem)
    cuts = np.sort(np.random.default_rng(num_stages).choice(np.arange(1, units.num_units), num_stages - 1, False))
    devices = np.searchsorted(cuts, np.arange(units.num_units), side="right")
    content = torch_pipelining.write(problem, units, devices)
    assert np.array_equal(read_devices("torch-pipelining", content, problem, units), devices)
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
def test_device_maps_parse_back(target: Any, training: bool) -> None:
    """A device map parses back to a placement with the figure that is printed."""
    from gdp.export.adapt import simulated

    problem, plan = planned("llama", training=training)
    adapted = adapt(problem, plan, target)
    devices = read_devices(target.name, adapted.content, problem, adapted.units)
    again = simulated(problem, adapted.units.place(devices), plan)
    assert again.step_time_ns == adapted.step_time_ns
    assert again.feasible


def test_offloaded_weights() -> None:
    """A GPU with room for 60 % of the step: the map has GPU and CPU entries that cover the model, begins with the GPU,
    and the figure is that of the map with weights fetched as each module begins, which fits."""
    from accelerate.utils import check_device_map

    from gdp.export.accelerate_maps import fetching_late, placement_of

    graph = graph_of("llama")
    roomy = gdp.Cluster.parse("p100-pcie-16g+cpu-16core")
    peak = gdp.simulate(Problem.build(graph, roomy), np.zeros(graph.num_ops, np.int64)).peak_memory_bytes[0]
    limit = {"gpu0": int(0.6 * peak)}
    problem = Problem.build(graph, roomy, max_memory_bytes=limit)
    plan = gdp.place(graph, roomy, budget="200sims", max_memory_bytes=limit)
    adapted = adapt(problem, plan, hf_device_map.TARGET)
    assert adapted.is_offloaded
    assert not adapted.simulation.missing_bytes.any()
    found = json.loads(adapted.content)
    assert set(found.values()) == {0, "cpu"}
    assert next(iter(found.values())) == 0
    check_device_map(MODELS["llama"]()[0], found)
    placement = placement_of(problem, found)
    assert placement is not None
    late = fetching_late(problem, placement)
    assert late is not None
    program = [np.flatnonzero(late[1] == device) for device in range(2)]
    assert gdp.simulate(*late, order=program).step_time_ns == adapted.step_time_ns == adapted.program_order_ns
    assert not adapt(problem, plan, hf_device_map.TARGET, may_offload=False).is_offloaded
